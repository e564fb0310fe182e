"""Compare every part within the group on its own, then add up: a part's scale and spread do not touch another's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from upshot.rewards.advantages.grouped import (
    Advantages,
    Step,
    Values,
    centred,
    combinations,
    estimators,
    spread,
    sums_of,
)
from upshot.rewards.credit import MAIN, Credit


@estimators.register("separated")
def separated(step: Step, non_negative: bool = False) -> Advantages:
    """Sums of the parts' own centred advantages; `non_negative`: only the main part can be negative."""
    return [spread(group, added(group, centred, non_negative)) for group in step]


def added(
    group: Sequence[Credit | None], compare: Callable[[Values], list[float | None]], non_negative: bool = False
) -> dict[tuple[str, ...], list[float | None]]:
    """For every combination of parts: the sum of what each of them earned; None where one of them is missing."""
    wanted = combinations(group)
    single: dict[str, list[float | None]] = {}
    for name in sorted({name for parts in wanted for name in parts}):
        advantages = compare(sums_of(group, (name,)))
        floored = [None if a is None else max(a, 0.0) for a in advantages]
        single[name] = floored if non_negative and name != MAIN else advantages
    return {parts: [_sum([single[name][i] for name in parts]) for i in range(len(group))] for parts in wanted}


def _sum(values: Values) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) if len(present) == len(values) else None
