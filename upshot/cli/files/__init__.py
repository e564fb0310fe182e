"""Verbs that process files and the output of runs."""
