"""What may stand before the `=` of an answer so that the other side is the answer: the name of a thing, and no more.

A symbol with its index and primes, points of a figure, a function of names and numbers, a text. Arithmetic is not a
name, not even a product without a sign: what `x-2` or `xy` is equal to says nothing yet about x.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_GREEK, _NO_NAME, _FUNCTION = (
    f"(?:{'|'.join(_TABLE[name].split())})(?![a-zA-Z])" for name in ("greek", "no_name", "functions")
)
_COMMAND = rf"\\(?!{_NO_NAME})[a-zA-Z]+(?![a-zA-Z])"
_INDEX = r"(?:_(?:\{[^{}]*\}|\d+|\w))?'*"
_LETTER = rf"(?:[a-zA-Z]|\\{_GREEK})"
_SYMBOL = (
    rf"(?:(?:\\overline\{{[A-Z]{{2}}\}}|\[[A-Z]{{3,5}}\]|\|[A-Z]{{1,3}}\||[fghA-Z]\^\{{-1\}}|\\Delta ?[a-zA-Z]"
    rf"|{_LETTER}){_INDEX}|(?:[A-Z]{_INDEX}){{2,4}})"
)
_NUMBER = r"-?(?:\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\})"
_ARGUMENT = rf"(?:{_SYMBOL}|{_NUMBER}|[A-Z] ?\\(?:cup|cap) ?[A-Z])"
_CALL = rf"{_LETTER}(?:\^\{{-1\}})?{_INDEX}\({_ARGUMENT}(?:,{_ARGUMENT})*\)"
_APPLIED = rf"(?:m(?=\\angle))?(?!\\{_GREEK}){_COMMAND}{_INDEX} ?(?:{_SYMBOL}|\d+|\({_ARGUMENT}(?:,{_ARGUMENT})*\))"
"""A command needs no brackets: \\sin x, \\log_2 8, m\\angle A; a Greek letter before another one is a factor."""
_SUMS = r"(?:[+*^=<>]|\d[a-zA-Z]\b|-(?:\s|\d|[a-zA-Z]\b)|\b[a-zA-Z]/|/\d)"
"""Arithmetic in a text: x-2, but not x-coordinate."""
NAME = re.compile(
    rf"{_SYMBOL}|{_COMMAND}{_INDEX}|{_CALL}|{_LETTER}{_INDEX}\({_CALL}\)|{_APPLIED}"
    rf"|⟪(?![^⟪⟫]*{_SUMS})[^⟪⟫]+⟫"
    r"|[PE][(\[][^()\[\]]*[)\]]|\\frac\{d[a-z]?\}\{d[a-z]\}"
)
_KNOWN = re.compile(rf"\\{_FUNCTION}(.*)")


def letters(text: str) -> set[str]:
    """The letters and commands in a text."""
    return set(re.findall(r"\\[a-zA-Z]+|[a-zA-Z]", text))


def own_letters(name: str) -> set[str]:
    """The letters in which a name's value cannot be expressed: the x of `x`, and of `\\sin x`, but not of `f(x)`."""
    known = _KNOWN.fullmatch(name)
    return letters(known[1]) if known else {name}
