"""Upshot as a library: reward, load, train."""
