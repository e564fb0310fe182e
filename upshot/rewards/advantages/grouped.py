"""Compare within the group: every combination of parts on its own.

In classmate training the kept thoughts compete by main + classmate, all other tokens by main alone. A reply takes part
in a combination's statistics whether or not it has such a span itself. A combination that a single reply of the group
has is compared without the parts that nobody else has. A group with fewer than two rewards says nothing about which
reply was better: its advantages are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Literal

from upshot.rewards.advantages.base import (
    Advantages,
    Step,
    Values,
    combinations,
    comparable,
    estimators,
    spread,
    sums_of,
)

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


def within_groups(
    step: Step, compare: Callable[[Values], list[float | None]], scale_by_step: bool = False
) -> Advantages:
    """Advantages of every span: its combination of parts, compared within the group; divided by the deviation over
    the whole step, where asked for."""
    groups = list(map(comparable, step))
    scales = _deviations(groups) if scale_by_step else {}
    advantages: Advantages = []
    for group in groups:
        by_parts = {}
        for parts in combinations(group):
            scale = scales.get(parts, 1.0)
            by_parts[parts] = [None if a is None else a / scale for a in compare(sums_of(group, parts))]
        advantages.append(spread(group, by_parts))
    return advantages


def _deviations(step: Step) -> dict[tuple[str, ...], float]:
    """The (sample) standard deviation of each combination of parts over all replies of the step."""
    out = {}
    for parts in {parts for group in step for parts in combinations(group)}:
        moved = centred(sums_of(list(chain.from_iterable(step)), parts))
        present = [a for a in moved if a is not None]
        out[parts] = math.sqrt(math.fsum(a * a for a in present) / max(len(present) - 1, 1)) + EPSILON
    return out


@estimators.register("grpo")
def grpo(step: Step, scale: Literal["group", "step", "none"] = "group") -> Advantages:
    """Centred by the group and divided by its standard deviation; `scale: step` divides by that of the whole step."""
    if scale == "step":
        return within_groups(step, centred, scale_by_step=True)
    return within_groups(step, normalised if scale == "group" else centred)


@estimators.register("dr-grpo")
def dr_grpo(step: Step) -> Advantages:
    """Centred by the group (Dr.GRPO: no division by the deviation)."""
    return within_groups(step, centred)


@estimators.register("rloo")
def rloo(step: Step) -> Advantages:
    """Each reward minus the mean of the others (leave one out)."""
    return within_groups(step, left_out)
