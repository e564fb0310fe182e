"""Our pieces in verl's shape (0.9.x): the only place that imports verl. Nothing is decided here."""
