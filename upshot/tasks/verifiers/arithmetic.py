"""Arithmetic steps in text: find `a op b = c`, evaluate exactly, say which do not hold.

Cautious on purpose: a step that cannot be read in full (words, variables, powers) is skipped, never called wrong.
A result given with d decimals holds when it is the value rounded (or cut) to d decimals.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

MAX_SCAN = 20_000
"""Characters of a reply that are looked at (its end): enough for any solution, and a bound on the work."""
_NOISE = Fraction(1, 10**12)
"""What floating point may add to a result: 0.1 + 0.2 = 0.30000000000000004."""
_MAX_TERMS = 40
_MAX_STEPS = 500
_LEFT = "-−+*/×÷x·$€£%(),. \t0123456789"
_RESULT = re.compile(r"[ \t]*[$€£]?[ \t]*[-−]?[$€£]?[ \t]*\d[\d,]{0,40}(?:\.\d{1,40})?%?")
_SENTENCE = re.compile(r"[.,;:]\s|\n")
_TOKEN = re.compile(r"\s*(?:(\d[\d,]*(?:\.\d+)?|\.\d+)(\s?%)?|([-+*/()]))")
# '3x-5' is algebra, '6 / 1/4' may mean either order, a leading '- 3' belongs to what stood before it
_AMBIGUOUS = re.compile(r"\dx\s*[-−+*/)=]|\dx$|/\s*\d+\s*/\s*\d|^\s*[-−]\s|,\s|\d\s+\d")
_FRACTION = re.compile(r"\(?\s*\$?\d+\s?/\s?\d+\s*\)?\s*")
_NAMES = str.maketrans({"−": "-", "×": "*", "x": "*", "÷": "/", "·": "*", "$": " ", "€": " ", "£": " "})


@dataclass(frozen=True, slots=True)
class ArithmeticStep:
    """One `expression = result` of a text."""

    text: str
    value: Fraction
    claimed: Fraction
    decimals: int

    @property
    def holds(self) -> bool:
        """Whether the claimed result is the value, up to the decimals it was given with and the noise of floats."""
        gap = abs(self.value - self.claimed)
        if self.decimals >= 10 and gap <= abs(self.value) * _NOISE:
            return True
        return gap == 0 or (self.value.denominator != 1 and gap < Fraction(1, 10**self.decimals))


def steps(text: str) -> list[ArithmeticStep]:
    """The arithmetic steps that could be read in full."""
    text = re.sub(r"<<[^<>]{0,200}>>", "", text[-MAX_SCAN:])
    found = []
    for equals in islice(re.finditer("=", text), _MAX_STEPS):
        window = _SENTENCE.split(text[max(0, equals.start() - 200) : equals.start()])[-1]
        left = window[len(window.rstrip(_LEFT)) :].lstrip(" \t,.%)+*/×÷x·")
        result = _RESULT.match(text, equals.end())
        if not left or result is None:
            continue
        start = equals.start() - len(left)
        before = text[max(0, start - 3) : start]
        after = text[result.end() : result.end() + 3].lstrip()
        if before[-1:].isalnum() or before[-1:] in (".", ",", "_") or (before.strip()[-1:] or "a") in "+*/×÷·^=)%\\-−":
            continue
        if after[:1] and after[:1] in "+-−*/×÷x·^%":
            continue
        step = _read(f"{left}={result[0]}")
        if step is not None:
            found.append(step)
    return found


def broken_steps(text: str) -> list[ArithmeticStep]:
    """The steps that do not hold."""
    return [step for step in steps(text) if not step.holds]


def _read(text: str) -> ArithmeticStep | None:
    left, _, right = text.rpartition("=")
    if "=" in left or not re.search(r"[\d)%]\s*[-−+*/×÷x·]", left) or _AMBIGUOUS.search(left):
        return None
    digits = re.sub(r"[^\d.\-−]", "", right).replace("−", "-").rstrip(".")
    percent = right.rstrip().endswith("%")
    value = evaluate(left)
    if value is None or not digits or len(digits) > 40:
        return None
    claimed = Fraction(digits)
    decimals = len(digits.partition(".")[2])
    if _FRACTION.fullmatch(left) and value < 1 < claimed and not percent:  # '2/3 (of 60) = 40'
        return None
    if percent:  # '5/20 = 25%' and '5/20*100 = 25%' are both written
        if abs(value - claimed) >= Fraction(1, 10**decimals):
            claimed, decimals = claimed / 100, decimals + 2
    elif "%" in left and value * 100 == claimed:  # '20% + 30% = 50'
        claimed /= 100
    return ArithmeticStep(" ".join(text.split()), value, claimed, decimals)


def evaluate(expression: str) -> Fraction | None:
    """The exact value of numbers joined by + - * / and parentheses; None when it is anything else or too long."""
    tokens = _tokens(expression.translate(_NAMES))
    if tokens is None or len(tokens) > 2 * _MAX_TERMS:
        return None
    try:
        value, rest = _sum(tokens, 0, 0)
    except (ValueError, ZeroDivisionError):
        return None
    return value if rest == len(tokens) else None


def _tokens(text: str) -> list[Fraction | str] | None:
    out: list[Fraction | str] = []
    position = 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or len(match[1] or "") > 40:
            return None
        if match[3]:
            out.append(match[3])
        else:
            digits = match[1].rstrip(",")
            if "," in digits and not re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", digits):
                return None
            number = Fraction(digits.replace(",", ""))
            out.append(number / 100 if match[2] else number)
        position = match.end()
    return out


def _sum(tokens: list[Fraction | str], at: int, depth: int) -> tuple[Fraction, int]:
    value, at = _product(tokens, at, depth)
    while at < len(tokens) and tokens[at] in ("+", "-"):
        operator = tokens[at]
        other, at = _product(tokens, at + 1, depth)
        value = value + other if operator == "+" else value - other
    return value, at


def _product(tokens: list[Fraction | str], at: int, depth: int) -> tuple[Fraction, int]:
    value, at = _atom(tokens, at, depth)
    while at < len(tokens) and tokens[at] in ("*", "/"):
        operator = tokens[at]
        other, at = _atom(tokens, at + 1, depth)
        value = value * other if operator == "*" else value / other
    return value, at


def _atom(tokens: list[Fraction | str], at: int, depth: int) -> tuple[Fraction, int]:
    if at >= len(tokens) or depth > 20:
        raise ValueError("not an expression")
    token = tokens[at]
    if isinstance(token, Fraction):
        return token, at + 1
    if token == "-":
        value, at = _atom(tokens, at + 1, depth + 1)
        return -value, at
    if token == "(":
        value, at = _sum(tokens, at + 1, depth + 1)
        if at < len(tokens) and tokens[at] == ")":
            return value, at + 1
    raise ValueError("not an expression")
