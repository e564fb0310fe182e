"""Adapts our parts to verl's interfaces (0.9.x): the only place that imports verl. Nothing is decided here."""
