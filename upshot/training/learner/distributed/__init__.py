"""Several ranks on one machine."""
