"""`upshot logs`: from a product's conversations to rows, a fitted user, a recipe, and how far to trust them."""
