"""Verbs that work through files and what runs have left behind."""
