"""Upshot trains language models on what comes of their words."""

__version__ = "0.1.0"
