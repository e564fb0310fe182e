"""GDPO: each part normalised within its group, added up, then shifted and scaled over the whole step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from upshot.rewards.advantages.base import Advantages, Step, Values, estimators, spread
from upshot.rewards.advantages.grouped import EPSILON, normalised
from upshot.rewards.advantages.separated import added


@estimators.register("gdpo")
def gdpo(step: Step) -> Advantages:
    """Per combination of parts: sums of group-normalised parts, z-scored over all replies of the step."""
    return over_the_step(step, [added(group, normalised) for group in step])


def over_the_step(step: Step, groups: Sequence[dict[tuple[str, ...], list[float | None]]]) -> Advantages:
    """What each group's combinations of parts earned, shifted and scaled over the step, as advantages of the spans."""
    out: list[dict[tuple[str, ...], list[float | None]]] = [{} for _ in groups]
    for parts in sorted({parts for own in groups for parts in own}):
        scaled = iter(z_scores([value for own in groups for value in own.get(parts, ())]))
        for own, new in zip(groups, out, strict=True):
            if parts in own:
                new[parts] = [next(scaled) for _ in own[parts]]
    return [spread(group, own) for group, own in zip(step, out, strict=True)]


def z_scores(values: Values) -> list[float | None]:
    """Shifted to mean 0 and scaled to (sample) deviation 1; zeros where fewer than two values are there."""
    present = [v for v in values if v is not None]
    if len(present) < 2:
        return [None if v is None else 0.0 for v in values]
    mean = math.fsum(present) / len(present)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in present) / (len(present) - 1))
    return [None if v is None else (v - mean) / (deviation + EPSILON) for v in values]
