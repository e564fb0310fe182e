"""Classmates: other models finish a thought, and their answers are scored."""
