"""From the originals to here: their scripts, flags, keys, metrics and files, and what each is called in Upshot."""
