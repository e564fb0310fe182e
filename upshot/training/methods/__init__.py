"""What each training method declares, one file each, without PyTorch: a recipe is read before that is imported."""
