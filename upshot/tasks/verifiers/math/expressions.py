"""Values of LaTeX expressions at a point, in microseconds: enough to tell two answers apart, and often to match them.

A small reader for numbers, one-letter variables, fractions, mixed numbers, roots, powers, factorials, the common
functions and implicit products. Rational arithmetic is exact, variables are drawn as fractions, so polynomials and
rational functions are compared exactly; what has roots or functions in it is compared to twelve digits. It also knows
arithmetic that was left undone (`3-1`, `4(5)`). Whatever may mean two things makes it say nothing (None): math-verify
is asked then. Anything that is not an expression is `MALFORMED`.
"""

from __future__ import annotations

import cmath
import math
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final, Literal

from upshot.tasks.verifiers.math.quantities import Number, UnsureQuantity, close, combine, exact_root, power

MALFORMED: Final = "malformed"
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][-+]?\d{1,2}(?![\w.]))?|\\[a-zA-Z]+|[a-zA-Z]|[-+*/^_(){}\[\]!|])")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}(?![a-zA-Z])")
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    name: getattr(cmath, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "exp")
}
_FUNCTIONS |= {"ln": cmath.log, "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan}
_FUNCTIONS |= {"cot": lambda x: 1 / cmath.tan(x), "sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x)}
_GREEK = frozenset({
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "theta", "lambda", "mu", "omega", "phi", "varphi",
    "rho", "sigma", "tau",
})  # fmt: skip
_CALLED = frozenset("fghFGHPE")
"""Letters that name a function where a bracket follows; any other one is a factor: n(n+1)."""
_TIMES = ("*", "\\cdot", "\\times")
_ATOMS = frozenset({"frac", "sqrt", "log", "pi", *_FUNCTIONS, *_GREEK})
READABLE = frozenset({*_ATOMS, "cdot", "times", "div", "circ", "infty"})
"""Commands that are part of a value; any other one in an answer is a thing left to do."""
_POINTS = ("first", "second", "negative")
"""Names of the points where expressions are compared; at the last one all variables are negative."""


class _Malformed(Exception):
    """Something that is not an expression."""


@dataclass(frozen=True, slots=True)
class Term:
    """A value, and whether it was written as one plain number."""

    value: Number
    literal: bool = False


@dataclass(frozen=True, slots=True)
class PointValue:
    """What an expression comes to at one point."""

    value: Number
    undone: bool
    """It joins plain numbers by + - × ÷ that nobody worked out."""
    letters: bool
    """It has variables."""


def same_value(left: str, right: str) -> bool | None:
    """Whether two expressions have the same value; None when this reader cannot tell."""
    for point in _POINTS:
        first, second = evaluate_at(left, point), evaluate_at(right, point)
        if first is None or second is None:
            return None
        if isinstance(first, str) or isinstance(second, str):
            return False
        verdict = close(first.value, second.value)
        if verdict is not True:  # what differs for negative values only may still be meant: log x^2 and 2 log x
            return None if point == "negative" else verdict
        if not first.letters and not second.letters:
            return True
    return True


@lru_cache(maxsize=256)
def _variable(letter: str, point: str) -> Fraction:
    """A letter's value at a point: drawn, so that no sum or product of letters meets another by construction."""
    size = Fraction(random.Random(f"{letter}@{point}").randrange(300, 2200), 997)
    return -size if point == "negative" else size


@lru_cache(maxsize=16_384)
def evaluate_at(text: str, point: str = "first") -> PointValue | Literal["malformed"] | None:
    """What an expression comes to at a point; None when it may mean two things or is not known."""
    if len(text) > 400 or _WORD.search(text):
        return None
    try:
        reader = _Reader(_tokens(text), point)
        value = reader.sum().value
        if reader.at + 1 != len(reader.tokens):
            return MALFORMED
    except _Malformed:
        return MALFORMED
    except (UnsureQuantity, ArithmeticError, ValueError, RecursionError):
        return None
    if isinstance(value, complex) and not (cmath.isfinite(value) and abs(value) < 1e12):
        return None
    return PointValue(value, reader.undone, reader.letters)


def may_be_number(text: str) -> bool:
    """Whether a text holds nothing but what numbers are made of: no letter besides e and i, no sign of another kind."""
    with suppress(UnsureQuantity):
        return not any(len(token) == 1 and token.isalpha() and token not in "ei" for token in _tokens(text))
    return False


def _tokens(text: str) -> list[str]:
    if _TOKEN.sub("", text).strip():
        raise UnsureQuantity
    return _TOKEN.findall(text)


class _Reader:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, tokens: list[str], point: str) -> None:
        self.tokens = [*tokens, ""]
        """Ends with an empty token."""
        self.point = point
        self.at = self.barred = 0
        self.undone = self.letters = False

    def sum(self) -> Term:
        term = self._product()
        while self._peek() in ("+", "-"):
            term = self._join(term, self._next(), self._product())
        return term

    def _product(self) -> Term:
        term = self._read_signed()
        divided = False
        while True:
            token = self._peek()
            if self._accept(*_TIMES):
                term = self._join(term, "*", self._read_signed())
            elif self._accept("/", "\\div"):
                term = self._join(term, "/", self._read_signed(), left_undone=token == "\\div")
                divided = True
            elif self._starts_factor(token):
                if divided:
                    raise UnsureQuantity  # 1/2x means either
                if token[0].isdigit():
                    raise _Malformed  # two numbers side by side
                term = self._join(term, "*", self._power())
            else:
                return term

    def _join(self, term: Term, sign: str, other: Term, left_undone: bool = True) -> Term:
        """Two terms as one; `left_undone`: of plain numbers somebody should have worked it out."""
        literal = term.literal and other.literal
        self.undone |= left_undone and literal
        return Term(combine(term.value, sign, other.value), literal)

    def _read_signed(self) -> Term:
        if self._peek() not in ("-", "+"):
            return self._power()
        sign = self._next()
        if self._peek() in ("-", "+"):
            raise _Malformed
        bracketed = self._peek() in ("(", "{")
        term = self._power()
        if bracketed and term.literal and isinstance(term.value, Fraction) and term.value < 0:
            self.undone = True  # -(-5)
        return Term(-term.value, term.literal) if sign == "-" else term

    def _power(self) -> Term:
        base = self._atom()
        if self._accept("!"):
            if self._peek() == "!" or self.letters or not isinstance(base.value, Fraction):
                raise UnsureQuantity
            if base.value.denominator != 1 or not 0 <= base.value <= 500:
                raise UnsureQuantity
            base = Term(Fraction(math.factorial(base.value.numerator)))
        if not self._accept("^"):
            return base
        if self._peek() == "\\circ" or self.tokens[self.at : self.at + 3] == ["{", "\\circ", "}"]:
            self.at += 1 if self._peek() == "\\circ" else 3
            return Term(complex(base.value) * cmath.pi / 180)
        return Term(power(base.value, self._argument().value))

    def _atom(self) -> Term:
        token = self._next()
        if token[0].isdigit():
            return self._number(token)
        if token in ("(", "{", "["):
            term = self.sum()
            self._expect({"(": ")", "{": "}", "[": "]"}[token])
            return term
        if token == "|":
            return self._absolute()
        if len(token) == 1 and token.isalpha():
            return Term(self._letter(token))
        if token.startswith("\\"):
            return self._command(token[1:])
        raise _Malformed

    def _absolute(self) -> Term:
        """|…|: a bar inside bars closes them wherever a value has just ended."""
        self.barred += 1
        inside = self.sum()
        self.barred -= 1
        self._expect("|")
        self.undone |= inside.literal
        value = inside.value
        return Term(abs(value) if isinstance(value, Fraction) else complex(abs(value)), inside.literal)

    def _number(self, token: str) -> Term:
        if len(token) > 100:
            raise UnsureQuantity
        value = Fraction(token)
        start, undone = self.at, self.undone
        if value.denominator == 1 and self._accept("\\frac"):
            # a mixed number, if the fraction is a plain one below 1
            part = self._join(self._argument(), "/", self._argument(), left_undone=False)
            if part.literal and isinstance(part.value, Fraction) and 0 < part.value < 1:
                return Term(value + part.value, literal=True)
            self.at, self.undone = start, undone
        return Term(value, literal=True)

    def _letter(self, letter: str) -> Number:
        if self._peek() == "_" or (self._peek() == "(" and letter in _CALLED):  # a subscript, or f(x)
            raise UnsureQuantity
        if letter == "i":
            return 1j
        if letter == "e":
            return complex(cmath.e)
        self.letters = True
        return _variable(letter, self.point)

    def _command(self, name: str) -> Term:
        if name == "frac":
            return self._join(self._argument(), "/", self._argument(), left_undone=False)
        if name == "sqrt":
            return self._root()
        if name == "pi":
            return Term(complex(cmath.pi))
        if name in _GREEK:
            self.letters = True
            return Term(_variable(name, self.point))
        if name == "log":
            if self._next() != "_":  # without a base some mean ten and some mean e
                raise UnsureQuantity
            base = complex(self._argument().value)
            return Term(cmath.log(complex(self._operand().value)) / cmath.log(base))
        if name in _FUNCTIONS:
            return Term(self._function(_FUNCTIONS[name]))
        raise UnsureQuantity

    def _root(self) -> Term:
        degree: Number = Fraction(2)
        if self._accept("["):
            degree = self.sum().value
            self._expect("]")
        below = self._argument().value
        if isinstance(below, Fraction) and isinstance(degree, Fraction):
            if (exact := exact_root(below, degree)) is not None:
                return Term(exact, literal=not self.letters)
            if below < 0 and degree == 3:
                return Term(-(complex(-below) ** (1 / 3)))
        return Term(complex(below) ** (1 / complex(degree)))

    def _function(self, function: Callable[[complex], complex]) -> complex:
        exponent = 1.0 + 0j
        if self._accept("^"):
            exponent = complex(self._argument().value)
            if exponent.real < 0:  # sin^{-1}: an inverse or a reciprocal
                raise UnsureQuantity
        return function(complex(self._operand().value)) ** exponent

    def _operand(self) -> Term:
        """What a function without braces is applied to: one factor; `sin 2x` is left to others."""
        bracketed = self._peek() in ("(", "{")
        term = self._power()
        if not bracketed and self._starts_factor(self._peek()):
            raise UnsureQuantity
        return term

    def _argument(self) -> Term:
        """A group, or the single digit or letter that TeX takes."""
        token = self._peek()
        if token[:1].isdigit() and len(token) > 1:
            raise UnsureQuantity  # x^12 without braces, \frac123: ambiguous
        return self._atom()

    def _starts_factor(self, token: str) -> bool:
        if token == "|":
            return not self.barred
        return bool(token) and (token[0].isalnum() or token in ("(", "{", "[") or token[1:] in _ATOMS)

    def _peek(self) -> str:
        return self.tokens[self.at]

    def _next(self) -> str:
        if not self.tokens[self.at]:
            raise _Malformed
        self.at += 1
        return self.tokens[self.at - 1]

    def _accept(self, *tokens: str) -> bool:
        """Whether the next token is one of these, which is then taken."""
        accepted = self.tokens[self.at] in tokens
        self.at += accepted
        return accepted

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            raise _Malformed
