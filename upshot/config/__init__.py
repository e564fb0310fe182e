"""What a recipe may say, how it is loaded, and names → classes."""
