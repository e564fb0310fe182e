"""Sets of real numbers in mathematical answers: inequalities, intervals, sets of numbers, and what joins them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce

from upshot.tasks.verifiers.math.expressions import PointValue, evaluate_at
from upshot.tasks.verifiers.math.kinds import Collection, Kind, Opaque, Reals, Value
from upshot.tasks.verifiers.math.real_sets import Real, RealSet, interval, points

LETTER = re.compile(r"[a-zA-Z](?:_(?:\{\w+\}|\w))?|\\(?:theta|alpha|beta|lambda|mu|phi)")
"""A variable that a set may be of."""
_TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


def inequality(sides: list[str], relations: list[str]) -> Reals | None:
    """x < a, a < x ≤ b, x ≠ a as sets; None for anything else."""
    half_lines: list[RealSet] = []
    at = next((n for n, side in enumerate(sides) if LETTER.fullmatch(side) and side not in "ei"), None)
    if at is None or len(sides) > 3 or (len(sides) == 3 and at != 1):
        return None
    if len(relations) == 2 and (relations[0][:2] in ("<", "\\l")) != (relations[1][:2] in ("<", "\\l")):
        return None
    for n, relation in enumerate(relations):
        end = real(sides[n] if n < at else sides[n + 1])
        if end is None or (relation not in _TURNED and relation != "\\ne"):
            return None
        half_lines.append(_half(end, _TURNED.get(relation, relation) if n < at else relation))
    return Reals(reduce(RealSet.intersection, half_lines), sides[at])


def _half(end: Real, relation: str) -> RealSet:
    if relation == "\\ne":
        return points([end]).complement()
    closed = relation in ("\\le", "\\ge")
    if relation in ("<", "\\le"):
        return interval(-math.inf, end, has_low=False, has_high=closed)
    return interval(end, math.inf, has_low=closed, has_high=False)


def real(text: str) -> Real | None:
    """The real number that an end of an interval is; None when it is none."""
    if infinite := re.fullmatch(r"([-+]?)\\infty", text):
        return -math.inf if infinite[1] == "-" else math.inf
    value = evaluate_at(text)
    if not isinstance(value, PointValue) or value.letters:
        return None
    if isinstance(value.value, Fraction):
        return value.value
    return value.value.real if abs(value.value.imag) < 1e-12 else None


def as_reals(kind: Kind) -> RealSet | None:
    """The set of reals that a collection is, where it is one: an interval or a set of numbers."""
    if isinstance(kind, Reals):
        return kind.members
    if not isinstance(kind, Collection) or not all(isinstance(item, Value) and not item.unit for item in kind.items):
        return None
    ends = [real(item.text) for item in kind.items if isinstance(item, Value)]
    reals = [end for end in ends if end is not None]
    if len(reals) != len(ends):
        return None
    if kind.brackets == "⦃⦄":
        return points(reals)
    if len(reals) != 2 or not kind.brackets or reals[0] > reals[1]:
        return None
    return interval(reals[0], reals[1], kind.brackets[0] == "[", kind.brackets[1] == "]")


def conditions(parts: list[Reals], joins: list[str]) -> Kind:
    """Inequalities joined: 'or' unites, 'and' intersects, a comma means whichever is not empty."""
    unites = any("or" in join for join in joins)
    intersects = any("and" in join for join in joins)
    if len({part.variable for part in parts}) > 1 or (unites and intersects):
        return Opaque(" ".join(str(part) for part in parts))
    both = reduce(RealSet.intersection, (part.members for part in parts))
    either = reduce(RealSet.union, (part.members for part in parts))
    return Reals(either if unites or (not intersects and not both.pieces) else both, parts[0].variable)


def combine_sets(kinds: Sequence[Kind], operators: Sequence[str]) -> Reals | None:
    """Sets joined by unions, intersections and differences; None where one of them is not a set of reals."""
    sets = [as_reals(kind) for kind in kinds]
    known = [one for one in sets if one is not None]
    if len(known) != len(sets):
        return None
    out = known[0]
    for operator, other in zip(operators, known[1:], strict=True):
        if operator == "\\cup":
            out = out.union(other)
        else:
            out = out.intersection(other if operator == "\\cap" else other.complement())
    return Reals(out)
