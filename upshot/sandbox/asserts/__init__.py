"""Verdicts on programs: tests split into calls and comparisons, made outside of the program."""
