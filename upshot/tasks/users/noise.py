"""Typing mistakes, which keep a simulated user from writing better than people do. A pure function of text and seed."""

from __future__ import annotations

import random


def mistype(text: str, share: float, rng: random.Random) -> str:
    """The text with about that share of its words mistyped; numbers and words with other signs stay as they are."""
    return " ".join(_slip(word, rng) if word.isalpha() and rng.random() < share else word for word in text.split(" "))


def _slip(word: str, rng: random.Random) -> str:
    """One slip: two letters swapped, one left out, one doubled, or the capital forgotten."""
    at, kind = rng.randrange(len(word)), rng.randrange(4)
    if kind == 0 and at + 1 < len(word):
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == 1 and len(word) > 2:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[: at + 1] + word[at:]
    return word.lower()
