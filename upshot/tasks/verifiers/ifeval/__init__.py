"""Conditions that a program can check: how many words, which language, what first."""
