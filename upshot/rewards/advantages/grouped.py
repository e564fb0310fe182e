"""An estimator turns the credits of a whole step into advantages, span by span. Pure functions on plain numbers.

A step is a list of groups, a group the replies to one prompt, a reply its `Credit` (None: nothing was sampled). What
comes back has the same shape, with one number a span; None where a span has no advantage and must not be trained. A
missing part leaves the statistics and costs only the spans that need it. A part that only one reply has cannot be
compared: it adds nothing, and the other parts of its spans still count (`comparable`). If a reply ended before turn k,
its last turn stands in for turn k; otherwise a turn that only one reply reached could not be compared.

The estimators below (GRPO, Dr.GRPO, RLOO) compare within the group, every combination of parts on its own: in classmate
training, thoughts that classmates saw are compared by main + classmate, all other tokens by main alone. A reply takes
part in a combination's statistics whether or not it has such a span itself. A group with fewer than two rewards says
nothing about which reply was better: its advantages are zero. The other estimators have a file each beside this one.

Your own is a function, named by its path: `train.advantage: my_pkg.module:estimator`, or with its keyword arguments
beside it: `{name: my_pkg.module:estimator, strength: 2}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal

from upshot.config.registry import Registry, with_options
from upshot.core.errors import UserError
from upshot.core.score import naming_errors, read_number, show
from upshot.rewards.credit import Credit, is_turn

Step = Sequence[Sequence[Credit | None]]
Advantages = list[list[list[float | None]]]
"""By group, reply and span."""
Estimator = Callable[[Step], Advantages]
Values = Sequence[float | None]

EPSILON = 1e-4
"""Added to the standard deviation, as TRL does."""

estimators: Registry[Advantages] = Registry("estimator", "upshot.rewards.advantages")
"""Estimators that a recipe can name in `train.advantage`."""


def estimator(name: str, options: Mapping[str, Any] | None = None) -> Estimator:
    """The estimator behind a name or path, with its options."""
    where = "train.advantage"
    function = estimators.get(name, where)
    estimate = with_options(function, options, ("step",), f"estimator '{name}'", where)
    return partial(_checked, estimate, name) if ":" in name else estimate


def _checked(estimate: Estimator, name: str, step: Step) -> Advantages:
    """The advantages by an estimator of the user's own; refused if they do not have the shape of the spans."""
    with naming_errors(f"train.advantage '{name}'"):
        advantages = estimate(step)
    message = f"train.advantage '{name}' should return one number (or None) per span, as [group][reply][span]; "
    try:
        if len(advantages) != len(step):
            raise UserError(f"{message}{len(step)} groups got {len(advantages)}")
        for number, (group, rows) in enumerate(zip(step, advantages, strict=True)):
            wanted = [len(credit.spans) if credit is not None else 0 for credit in group]
            if (shape := [*map(len, rows)]) != wanted:
                raise UserError(f"{message}group {number} with {wanted} spans by reply got {shape}")
            for place, value in enumerate(chain.from_iterable(rows)):
                if value is not None and read_number(value) is None:
                    raise UserError(f"{message}span {place} of group {number} got {show(value)}")
    except TypeError:
        raise UserError(f"{message}it returned {repr(advantages)[:80]}") from None
    return advantages


def combinations(group: Sequence[Credit | None]) -> list[tuple[str, ...]]:
    """The combinations of parts that some span of the group is credited with, in a stable order."""
    return sorted({span.parts for credit in group if credit is not None for span in credit.spans if span.parts})


def sums_of(group: Sequence[Credit | None], names: tuple[str, ...]) -> list[float | None]:
    """What each reply earned by some parts together; None where it does not have all of them.

    If the reply ended before a turn, its last turn stands in for it.
    """
    sums: list[float | None] = []
    for credit in group:
        parts = credit.parts if credit is not None else {}
        reached: Sequence[str] = names
        if not parts.keys() >= {*names}:
            turns = list(filter(is_turn, parts))
            reached = [turns[-1] if turns and is_turn(name) and name not in parts else name for name in names]
        values = [parts[name].value for name in reached if name in parts]
        present = [value for value in values if value is not None]
        sums.append(sum(present) if names and len(present) == len(names) else None)
    return sums


def spread(group: Sequence[Credit | None], by_parts: Mapping[tuple[str, ...], Values]) -> list[list[float | None]]:
    """For every span of a group, the value that its reply has for the span's combination of parts."""
    return [
        [] if credit is None else [by_parts[span.parts][member] if span.parts else None for span in credit.spans]
        for member, credit in enumerate(group)
    ]


def comparable(pool: Sequence[Credit | None]) -> list[Credit | None]:
    """Replies that are compared with each other, their spans without the parts that too few of them share.

    The rarest part of a combination (the last one on ties) is dropped until at least two replies have all that remain.
    If no two replies share any of them, all stay: there is nothing to compare. A span that lost parts and whose own sum
    is missing has none left: it stays untrained.
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


def centred(rewards: Values) -> list[float | None]:
    """Each reward minus the mean of the group."""
    present = [r for r in rewards if r is not None]
    mean = math.fsum(present) / max(len(present), 1)
    return [None if r is None else r - mean for r in rewards]


def normalised(rewards: Values) -> list[float | None]:
    """Each reward minus the mean of the group, divided by its (sample) standard deviation."""
    moved = centred(rewards)
    scale = deviation(moved) + EPSILON
    return [None if a is None else a / scale for a in moved]


def deviation(moved: Values) -> float:
    """The (sample) standard deviation of values around 0."""
    present = [a for a in moved if a is not None]
    return math.sqrt(math.fsum(a * a for a in present) / max(len(present) - 1, 1))


def leave_one_out(rewards: Values) -> list[float | None]:
    """Each reward minus the mean of the others."""
    present = [r for r in rewards if r is not None]
    if len(present) < 2:
        return [None if r is None else 0.0 for r in rewards]
    total = math.fsum(present)
    return [None if r is None else r - (total - r) / (len(present) - 1) for r in rewards]


def within_groups(
    step: Step, compare: Callable[[Values], list[float | None]], scale_by_step: bool = False
) -> Advantages:
    """Advantages of every span: its combination of parts, compared within the group; divided by the deviation over
    the whole step if `scale_by_step`."""
    groups = list(map(comparable, step))
    replies = list(chain.from_iterable(groups)) if scale_by_step else []
    scales = {parts: deviation(centred(sums_of(replies, parts))) + EPSILON for parts in combinations(replies)}
    advantages: Advantages = []
    for group in groups:
        by_parts = {}
        for parts in combinations(group):
            scale = scales.get(parts, 1.0)
            by_parts[parts] = [None if a is None else a / scale for a in compare(sums_of(group, parts))]
        advantages.append(spread(group, by_parts))
    return advantages


@estimators.register("grpo")
def grpo(step: Step, scale: Literal["group", "step", "none"] = "group") -> Advantages:
    """Centred by the group and divided by its standard deviation; `scale: step` divides by that of the whole step."""
    return within_groups(step, normalised if scale == "group" else centred, scale_by_step=scale == "step")


@estimators.register("dr-grpo")
def dr_grpo(step: Step) -> Advantages:
    """Centred by the group (Dr.GRPO: no division by the deviation)."""
    return within_groups(step, centred)


@estimators.register("rloo")
def rloo(step: Step) -> Advantages:
    """Each reward minus the mean of the others (leave one out)."""
    return within_groups(step, leave_one_out)
