"""Episodes and futures: the async loop that plays conversations."""
