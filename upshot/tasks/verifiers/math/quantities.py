"""Numbers that stay exact as long as they can: fractions, until a root, a function or `i` makes them floating point."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from fractions import Fraction

Number = Fraction | complex

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_MAX_BITS = 12_000
"""Larger fractions are not worked with: nobody means them, and they take long."""
_COMMON = 10**6
"""A decimal with a larger denominator is not one that a root or function comes to, only near."""


class UnsureQuantity(Exception):
    """Something that may mean two things, or that is not known or too large here."""


def close(first: Number, second: Number) -> bool | None:
    """Whether two values are the same; None when floating point cannot tell."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    for one in (first, second):
        if isinstance(one, Fraction) and one.denominator > _COMMON:
            return False
    try:
        gap = abs(complex(first) - complex(second)) / (1 + abs(complex(first)))
    except OverflowError:
        return None
    return True if gap <= 1e-11 else False if gap > 1e-8 else None


def all_of(verdicts: Iterable[bool | None]) -> bool | None:
    """False if any is, else unknown if any is, else true."""
    listed = list(verdicts)
    return False if False in listed else None if None in listed else True


def combine(first: Number, sign: str, second: Number) -> Number:
    """A sum, difference, product or quotient; exact when both are."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        value: Fraction = _OPERATORS[sign](first, second)
        if _bits(value) > _MAX_BITS:
            raise UnsureQuantity
        return value
    return _OPERATORS[sign](complex(first), complex(second))


def power(base: Number, exponent: Number) -> Number:
    """A power; exact for whole exponents and for roots that come out even."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            if _bits(base) * abs(exponent.numerator) > _MAX_BITS:
                raise UnsureQuantity
            return base**exponent.numerator
        if (root := exact_root(base, Fraction(exponent.denominator))) is not None:
            return power(root, Fraction(exponent.numerator))
    if abs(complex(exponent)) > 200:
        raise UnsureQuantity
    return complex(base) ** complex(exponent)


def exact_root(value: Fraction, degree: Fraction) -> Fraction | None:
    """The root of a fraction where it is a fraction, as of 4/9."""
    if degree.denominator != 1 or not 2 <= degree <= 12 or value < 0 or _bits(value) > 900:
        return None
    n = int(degree)
    root = Fraction(_whole_root(value.numerator, n), _whole_root(value.denominator, n))
    return root if root**n == value else None


def _whole_root(value: int, degree: int) -> int:
    return math.isqrt(value) if degree == 2 else round(value ** (1 / degree))


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()
