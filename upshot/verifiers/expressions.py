"""Values of LaTeX expressions at a point, in microseconds: enough to tell two answers apart, and often to match them.

A small reader for numbers, one-letter variables, fractions, roots, powers, the common functions and implicit products.
Two expressions that differ at one point are different; two that agree to twelve digits at three points chosen for
nothing are taken to be equal. Whatever it does not know makes it say nothing (None): math-verify is asked then.
"""

from __future__ import annotations

import cmath
import random
import re
from collections.abc import Callable
from functools import lru_cache

Value = complex

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|\\([a-zA-Z]+)|([a-zA-Z])|([-+*/^_(){}\[\]|!]))")
_WORD = re.compile(r"(?<!\\)\b[a-zA-Z]{4,}\b")
_MIXED = re.compile(r"\d\s*\\frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|\d\s+\d")
_CONSTANTS: dict[str, Value] = {"pi": cmath.pi}
_FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "ln": cmath.log,
    "exp": cmath.exp,
    "arctan": cmath.atan,
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
}
_POINTS = ("first", "second", "negative")
"""Names of the points where expressions are compared; at the last one all variables are negative."""


class _Unknown(Exception):
    """Something this reader does not know."""


def same_value(left: str, right: str) -> bool | None:
    """Whether two expressions have the same value; None when this reader cannot tell."""
    decimals = ("." in left) != ("." in right)
    for point in _POINTS:
        first, second = _value(left, point), _value(right, point)
        if first is None or second is None:
            return None
        gap = abs(first - second) / (1 + abs(first))
        if gap > 1e-5:  # what differs for negative values only may still be meant: log x^2 and 2 log x
            return None if point == "negative" else False
        if gap > 1e-11 or decimals:  # close, or a decimal beside an exact form: not for floating point to decide
            return None
    return True


@lru_cache(maxsize=256)
def _variable(letter: str, point: str) -> Value:
    """A letter's value at a point: drawn, so that no sum or product of letters meets another by construction."""
    size = random.Random(f"{letter}@{point}").uniform(0.3, 2.2)
    return complex(-size if point == "negative" else size)


@lru_cache(maxsize=8192)
def _value(text: str, point: str) -> Value | None:
    if len(text) > 400 or _WORD.search(text) or _MIXED.search(text):
        return None
    try:
        reader = _Reader(_tokens(text), point)
        value = reader.sum()
        if reader.at != len(reader.tokens):
            return None
    except (_Unknown, ArithmeticError, ValueError, RecursionError):
        return None
    return value if cmath.isfinite(value) and abs(value) < 1e12 else None


def _tokens(text: str) -> list[str]:
    out: list[str] = []
    position = 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _Unknown
        out.append(f"\\{match[2]}" if match[2] else match[1] or match[3] or match[4])
        position = match.end()
    return out


class _Reader:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, tokens: list[str], point: str) -> None:
        self.tokens = tokens
        self.point = point
        self.at = 0

    def sum(self) -> Value:
        value = self._product()
        while self._peek() in ("+", "-"):
            sign = self._next()
            other = self._product()
            value = value + other if sign == "+" else value - other
        return value

    def _product(self) -> Value:
        value = self._signed()
        divided = False
        while True:
            token = self._peek()
            if token in ("*", "\\cdot", "\\times"):
                self._next()
                value *= self._signed()
            elif token in ("/", "\\div"):
                self._next()
                value /= self._signed()
                divided = True
            elif token and (token[0].isalnum() or token in ("(", "{", "[") or _opens(token)):
                if divided:
                    raise _Unknown  # 1/2x means either
                value *= self._power()
            else:
                return value

    def _signed(self) -> Value:
        if self._peek() in ("-", "+"):
            return -self._signed() if self._next() == "-" else self._signed()
        return self._power()

    def _power(self) -> Value:
        base = self._atom()
        if self._peek() == "!":
            raise _Unknown
        if self._peek() == "^":
            self._next()
            exponent = self._argument()
            if abs(exponent) > 200:
                raise _Unknown
            return base**exponent
        return base

    def _atom(self) -> Value:
        token = self._next()
        if token[0].isdigit() or token[0] == ".":
            return complex(float(token))
        if token in ("(", "{", "["):
            value = self.sum()
            self._expect({"(": ")", "{": "}", "[": "]"}[token])
            return value
        if len(token) == 1 and token.isalpha():
            return self._letter(token)
        return self._command(token.removeprefix("\\"))

    def _letter(self, letter: str) -> Value:
        if self._peek() in ("_", "("):  # a subscript, or f(x): not a plain variable
            raise _Unknown
        if letter == "i":
            return 1j
        if letter == "e":
            return complex(cmath.e)
        return _variable(letter, self.point)

    def _command(self, name: str) -> Value:
        if name == "frac":
            above = self._argument()
            return above / self._argument()
        if name == "sqrt":
            degree = complex(2)
            if self._peek() == "[":
                self._next()
                degree = self.sum()
                self._expect("]")
            return self._argument() ** (1 / degree)
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name == "log":
            if self._next() != "_":  # without a base some mean ten and some mean e
                raise _Unknown
            base = self._argument()
            return cmath.log(self._operand()) / cmath.log(base)
        if name in _FUNCTIONS:
            return self._function(_FUNCTIONS[name])
        raise _Unknown

    def _function(self, function: Callable[[Value], Value]) -> Value:
        exponent = complex(1)
        if self._peek() == "^":
            self._next()
            exponent = self._argument()
            if exponent.real < 0:  # sin^{-1}: an inverse or a reciprocal
                raise _Unknown
        return function(self._operand()) ** exponent

    def _operand(self) -> Value:
        """What a function without braces is applied to: one factor; `sin 2x` is left to others."""
        if self._peek() in ("(", "{"):
            return self._atom()
        value = self._power()
        following = self._peek()
        if following and (following[0].isalnum() or following in ("(", "{") or _opens(following)):
            raise _Unknown
        return value

    def _argument(self) -> Value:
        """A braced group, or the single digit or letter that TeX takes."""
        token = self._peek()
        if token == "{":
            return self._atom()
        if token and token[0].isdigit():
            if len(token) > 1:
                raise _Unknown  # x^12 without braces, \frac123: ambiguous
            self._next()
            return complex(float(token))
        return self._atom()

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _next(self) -> str:
        if self.at >= len(self.tokens):
            raise _Unknown
        self.at += 1
        return self.tokens[self.at - 1]

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise _Unknown


def _opens(token: str) -> bool:
    """Whether a command starts a factor."""
    name = token.removeprefix("\\")
    return token.startswith("\\") and (name in ("frac", "sqrt", "log") or name in _CONSTANTS or name in _FUNCTIONS)
