"""GDPO: each part normalised within its group, added up, then shifted and scaled over the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from upshot.rewards.advantages.grouped import Advantages, Step, comparable, estimators, normalised, spread
from upshot.rewards.advantages.separated import added


@estimators.register("gdpo")
def gdpo(step: Step, step_norm: Literal["all", "sums", "none"] = "all") -> Advantages:
    """Per combination of parts: sums of group-normalised parts, z-scored over all replies of the step.

    step_norm: which of them are z-scored. sums: those of several parts alone, as the published classmate trainer does:
    tokens that earn the main part only (the answer) keep their group-normalised value. none: nothing is.
    """
    compared = [comparable(group) for group in step]
    from_parts = {"all": 1, "sums": 2}.get(step_norm)
    return over_the_step(compared, [added(group, normalised) for group in compared], from_parts)


def over_the_step(
    step: Step, groups: Sequence[dict[tuple[str, ...], list[float | None]]], from_parts: int | None = 1
) -> Advantages:
    """What each group's combinations of parts earned, shifted and scaled over the step, as advantages of the spans.

    `from_parts`: combinations of fewer parts stay as they are; None: all of them do.
    """
    out: list[dict[tuple[str, ...], list[float | None]]] = [{} for _ in groups]
    for parts in sorted({parts for of_group in groups for parts in of_group}):
        values = [value for of_group in groups for value in of_group.get(parts, ())]
        scaled = iter(values if from_parts is None or len(parts) < from_parts else normalised(values))
        for of_group, new in zip(groups, out, strict=True):
            if parts in of_group:
                new[parts] = [next(scaled) for _ in of_group[parts]]
    return [spread(group, of_group) for group, of_group in zip(step, out, strict=True)]
