"""The kinds of things that a mathematical answer can be; `reading` tells which one it is."""

from __future__ import annotations

from dataclasses import dataclass

from upshot.tasks.verifiers.math.real_sets import RealSet


@dataclass(frozen=True, slots=True)
class Value:
    """One expression, with its unit, or the base that its digits are written in."""

    text: str
    unit: str = ""
    base: int = 0
    """0 where none is said."""
    name: str = ""
    """The x of `x = …`."""


@dataclass(frozen=True, slots=True)
class Collection:
    """Several things: `()` and alike keep their order, `⦃⦄` and a plain list ('') do not."""

    brackets: str
    items: tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class Assignments:
    """Values of several names: x = 1, y = 2."""

    items: tuple[tuple[str, Kind], ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """Left side minus right side, which is zero."""

    left: str
    right: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Things said to be equal: x = 7/2 = 3.5."""

    items: tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of values, and what all of them are times."""

    rows: tuple[tuple[Kind, ...], ...]
    factor: str = ""
    is_vector: bool = False
    """Written as a tuple, which is neither a row nor a column."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How several values stand to each other: 3 : 4."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reals:
    """A set of real numbers, of a variable where an inequality names one."""

    members: RealSet
    variable: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A text, in lower case; or a single letter, as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """Something that is none of these."""

    text: str


Kind = Value | Collection | Assignments | Equation | Chain | Matrix | Ratio | Reals | Words | Opaque
