"""Compare within the group: every combination of parts on its own.

In classmate training the kept thoughts compete by main + classmate, all other tokens by main alone. A reply takes part
in a combination's statistics whether or not it has such a span itself. A group with fewer than two rewards says nothing
about which reply was better: its advantages are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from upshot.rewards.estimators.base import Advantages, Step, Values, combinations, estimators, part, spread

EPSILON = 1e-4
"""Added to the standard deviation, as TRL does."""


def centred(rewards: Values) -> list[float | None]:
    """Each reward minus the mean of the group."""
    present = [r for r in rewards if r is not None]
    if len(present) < 2:
        return [None if r is None else 0.0 for r in rewards]
    mean = math.fsum(present) / len(present)
    return [None if r is None else r - mean for r in rewards]


def normalised(rewards: Values) -> list[float | None]:
    """Each reward minus the mean of the group, divided by its (sample) standard deviation."""
    moved = centred(rewards)
    present = [a for a in moved if a is not None]
    if len(present) < 2:
        return moved
    deviation = math.sqrt(math.fsum(a * a for a in present) / (len(present) - 1))
    return [None if a is None else a / (deviation + EPSILON) for a in moved]


def left_out(rewards: Values) -> list[float | None]:
    """Each reward minus the mean of the others."""
    present = [r for r in rewards if r is not None]
    if len(present) < 2:
        return [None if r is None else 0.0 for r in rewards]
    total = math.fsum(present)
    return [None if r is None else r - (total - r) / (len(present) - 1) for r in rewards]


def within_groups(step: Step, compare: Callable[[Values], list[float | None]]) -> Advantages:
    """Advantages of every span: its combination of parts, compared within the group."""
    return [
        spread(group, {parts: compare([part(credit, parts) for credit in group]) for parts in combinations(group)})
        for group in step
    ]


@estimators.register("grpo")
def grpo(step: Step) -> Advantages:
    """Centred by the group and divided by its standard deviation."""
    return within_groups(step, normalised)


@estimators.register("dr-grpo")
def dr_grpo(step: Step) -> Advantages:
    """Centred by the group (Dr.GRPO: no division by the deviation)."""
    return within_groups(step, centred)


@estimators.register("rloo")
def rloo(step: Step) -> Advantages:
    """Each reward minus the mean of the others (leave one out)."""
    return within_groups(step, left_out)
