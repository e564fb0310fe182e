"""An estimator turns the credits of a whole step into advantages, span by span. Pure functions on plain numbers.

A step is a list of groups, a group the replies to one prompt, a reply its `Credit` (None: nothing was sampled). What
comes back has the same shape, with one number a span; None where a span has no advantage and must not be trained. A
missing part leaves the statistics and costs only the spans that need it. A part that only one reply has can be compared
with nobody's: it adds nothing, and the other parts of its spans still count (`comparable`). A turn is compared with
the last turn of replies that ended before it: left out, a turn that only one reply reaches would teach nothing.

Your own is a function, named by its path: `train.advantage: my_pkg.module:estimator`, or with its keyword arguments
beside it: `{name: my_pkg.module:estimator, strength: 2}`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from upshot.config.registry import Registry, check_options
from upshot.core.errors import UserError
from upshot.rewards.credit import Credit, is_turn

Step = Sequence[Sequence[Credit | None]]
Advantages = list[list[list[float | None]]]
"""By group, reply and span."""
Estimator = Callable[[Step], Advantages]
Values = Sequence[float | None]

estimators: Registry[Advantages] = Registry("estimator", "upshot.rewards.advantages")
"""Estimators that a recipe can name in `train.advantage`."""


def estimator(name: str, options: Mapping[str, Any] | None = None) -> Estimator:
    """The estimator behind a name or path, with its options."""
    where = "train.advantage"
    function = estimators.get(name, where)
    first = next(iter(inspect.signature(function).parameters), None)
    if first is None:
        raise UserError(f"estimator '{name}' in {where} should take a step's credits as its first argument")
    checked = check_options(function, options or {}, {first: None}, f"estimator '{name}'", where)
    del checked[first]
    return partial(function, **checked)


def check_shape(advantages: Advantages, step: Step, name: str) -> None:
    """Refuse what an estimator of the user's own returned where it is not a number or None for every span."""
    wanted = [[len(credit.spans) if credit is not None else 0 for credit in group] for group in step]
    try:
        shape = [[len(spans) for spans in group] for group in advantages]
    except TypeError:
        shape = []
    if shape != wanted:
        raise UserError(
            f"train.advantage '{name}' should return one number (or None) per span, in lists by group and reply; a "
            f"step with {wanted} spans by group and reply got {shape or repr(advantages)[:80]}"
        )


def combinations(group: Sequence[Credit | None]) -> list[tuple[str, ...]]:
    """The combinations of parts that some span of the group is credited with, in a stable order."""
    return sorted({span.parts for credit in group if credit is not None for span in credit.spans if span.parts})


def sums_of(group: Sequence[Credit | None], names: tuple[str, ...]) -> list[float | None]:
    """What each reply earned by some parts together; None where it does not have all of them.

    For a turn that the reply did not reach its last one stands: how it ended.
    """
    sums: list[float | None] = []
    for credit in group:
        parts = credit.parts if credit is not None else {}
        turns = list(filter(is_turn, parts))
        reached = [turns[-1] if turns and is_turn(name) and name not in parts else name for name in names]
        values = [parts[name].value for name in reached if name in parts]
        present = [value for value in values if value is not None]
        sums.append(sum(present) if names and len(present) == len(names) else None)
    return sums


def spread(group: Sequence[Credit | None], by_parts: Mapping[tuple[str, ...], Values]) -> list[list[float | None]]:
    """Every span of a group with what its combination of parts earned its reply."""
    return [
        [] if credit is None else [by_parts[span.parts][member] if span.parts else None for span in credit.spans]
        for member, credit in enumerate(group)
    ]


def comparable(pool: Sequence[Credit | None]) -> list[Credit | None]:
    """Replies that are compared with each other, their spans without the parts that too few of them share.

    The rarest parts of a combination (of equals, the last) are left out until two replies have all that is left. Where
    no two replies share any of them, all stay: there is nothing to compare. A span of such parts whose own sum is
    missing has none left: it stays untrained.
    """
    shared: dict[tuple[str, ...], tuple[str, ...]] = {}
    sums: dict[tuple[str, ...], Values] = {}
    for parts in combinations(pool):
        left, earned = parts, sums_of(pool, parts)
        sums[parts] = earned
        while left and len(earned) - earned.count(None) < 2:
            missing = {name: sums_of(pool, (name,)).count(None) for name in left}
            rarest = max(reversed(left), key=missing.__getitem__)
            left = tuple(name for name in left if name != rarest)
            earned = sums_of(pool, left)
        shared[parts] = left or parts
    kept: list[Credit | None] = []
    for member, credit in enumerate(pool):
        spans = []
        for span in credit.spans if credit is not None else ():
            parts = shared.get(span.parts, ())
            has_all = parts == span.parts or sums[span.parts][member] is not None
            spans.append(replace(span, parts=parts if has_all else ()))
        kept.append(replace(credit, spans=tuple(spans)) if credit is not None else None)
    return kept
