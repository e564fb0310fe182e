"""Subsets of the real line: intervals, points, their unions, intersections and complements. What inequalities say."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from upshot.tasks.verifiers.math.quantities import all_of, close

Real = Fraction | float


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval; a point when both ends are the same."""

    low: Real
    high: Real
    has_low: bool
    has_high: bool

    @property
    def empty(self) -> bool:
        """Whether nothing lies in it."""
        return self.low > self.high or (self.low == self.high and not (self.has_low and self.has_high))


@dataclass(frozen=True, slots=True)
class RealSet:
    """Pieces in order, none touching the next."""

    pieces: tuple[Interval, ...]

    def union(self, other: RealSet) -> RealSet:
        """What lies in either."""
        return unite((*self.pieces, *other.pieces))

    def complement(self) -> RealSet:
        """What lies outside."""
        out: list[Interval] = []
        low: Real = -math.inf
        open_low = False
        for piece in self.pieces:
            out.append(Interval(low, piece.low, open_low, not piece.has_low))
            low, open_low = piece.high, not piece.has_high
        out.append(Interval(low, math.inf, open_low, has_high=False))
        return unite(piece for piece in out if not math.isinf(piece.low) or piece.low != piece.high)

    def intersection(self, other: RealSet) -> RealSet:
        """What lies in both."""
        return self.complement().union(other.complement()).complement()

    def same(self, other: RealSet) -> bool | None:
        """Whether two sets are the same; None when two ends are too close to call."""
        if [(p.has_low, p.has_high) for p in self.pieces] != [(p.has_low, p.has_high) for p in other.pieces]:
            return False
        pairs = list(zip(self.pieces, other.pieces, strict=True))
        return all_of(_same_end(*ends) for one, two in pairs for ends in ((one.low, two.low), (one.high, two.high)))


def _same_end(one: Real, two: Real) -> bool | None:
    if math.isinf(one) or math.isinf(two):
        return one == two
    return close(*(end if isinstance(end, Fraction) else complex(end) for end in (one, two)))


def unite(pieces: Iterable[Interval]) -> RealSet:
    """The set of several pieces, with those that overlap or touch made one."""
    out: list[Interval] = []
    for piece in sorted((p for p in pieces if not p.empty), key=lambda p: (p.low, not p.has_low)):
        last = out[-1] if out else None
        if last is None or piece.low > last.high or (piece.low == last.high and not (last.has_high or piece.has_low)):
            out.append(piece)
        elif piece.high > last.high or (piece.high == last.high and piece.has_high):
            out[-1] = Interval(last.low, piece.high, last.has_low, piece.has_high)
    return RealSet(tuple(out))


def interval(low: Real, high: Real, has_low: bool, has_high: bool) -> RealSet:
    """One interval; infinite ends are never part of it."""
    return unite([Interval(low, high, has_low and not math.isinf(low), has_high and not math.isinf(high))])


def points(values: Iterable[Real]) -> RealSet:
    """Single points."""
    return unite(Interval(value, value, has_low=True, has_high=True) for value in values)


EMPTY = RealSet(())
ALL = interval(-math.inf, math.inf, has_low=False, has_high=False)
