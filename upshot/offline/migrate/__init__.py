"""Translates from the originals: their scripts, flags, keys, metrics and files, and the names of each in Upshot."""
