"""Playing by hand: a recipe's stage without training, its trees on a terminal, a chat with a model."""
