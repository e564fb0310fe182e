"""Verdicts on programs: tests are split into calls and comparisons, and compared outside the program."""
