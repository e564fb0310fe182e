"""Playing by hand: a recipe without training, its trees on a terminal, a chat with a model."""
