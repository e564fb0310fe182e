"""Arithmetic steps in text: find `a op b = c`, evaluate exactly, say which do not hold.

Cautious on purpose: a step that cannot be read in full (words, variables, powers) is skipped, never called wrong.
A result given with d decimals holds when it is the value rounded (or cut) to d decimals.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
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
_NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?|\.\d+)(\s?%)?")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
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
    readable = []
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
        if (step := _read(f"{left}={result[0]}")) is not None:
            readable.append(step)
    return readable


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
    numbers: list[Fraction | None] = []

    def name(match: re.Match[str]) -> str:
        numbers.append(_number(match[1], bool(match[2])))
        return f" n{len(numbers) - 1} "

    text = expression.translate(_NAMES).strip()
    if len(text) > _MAX_TERMS * 45 or re.search(r"[^-+*/()\s\d.,%]", text):
        return None
    named = _NUMBER.sub(name, text)
    if None in numbers or len(numbers) > _MAX_TERMS:
        return None
    with suppress(SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return _value(ast.parse(" ".join(named.split()), mode="eval").body, numbers)
    return None


def _number(digits: str, percent: bool) -> Fraction | None:
    digits = digits.rstrip(",")
    if len(digits) > 40 or ("," in digits and not re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", digits)):
        return None
    number = Fraction(digits.replace(",", ""))
    return number / 100 if percent else number


def _value(node: ast.expr, numbers: Sequence[Fraction | None]) -> Fraction:
    """The value of a tree that has no other leaves than the names of numbers."""
    if isinstance(node, ast.Name):
        return numbers[int(node.id[1:])] or Fraction(0)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
    raise ValueError("not an expression")
