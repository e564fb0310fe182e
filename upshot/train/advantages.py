"""Rewards of a group → advantages. Pure functions on plain numbers; missing rewards leave the statistics.

A group is the replies to one prompt. `None` in, `None` out: a reply without a reward is in no mean, no deviation and
no loss. A group with fewer than two rewards says nothing about which reply was better: its advantages are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from upshot.errors import UserError, did_you_mean
from upshot.rewards.credit import Credit

Values = Sequence[float | None]
Estimator = Callable[[Values], list[float | None]]

EPSILON = 1e-4
"""Added to the standard deviation, as TRL does."""


def dr_grpo(rewards: Values) -> list[float | None]:
    """Centred by the mean of the group (Dr.GRPO: no division by the deviation)."""
    present = [r for r in rewards if r is not None]
    if len(present) < 2:
        return [None if r is None else 0.0 for r in rewards]
    mean = math.fsum(present) / len(present)
    return [None if r is None else r - mean for r in rewards]


def grpo(rewards: Values) -> list[float | None]:
    """Centred by the mean of the group and divided by its (sample) standard deviation."""
    centred = dr_grpo(rewards)
    present = [a for a in centred if a is not None]
    if len(present) < 2:
        return centred
    deviation = math.sqrt(math.fsum(a * a for a in present) / (len(present) - 1))
    return [None if a is None else a / (deviation + EPSILON) for a in centred]


def rloo(rewards: Values) -> list[float | None]:
    """Each reward minus the mean of the others (leave one out)."""
    present = [r for r in rewards if r is not None]
    if len(present) < 2:
        return [None if r is None else 0.0 for r in rewards]
    total = math.fsum(present)
    return [None if r is None else r - (total - r) / (len(present) - 1) for r in rewards]


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "dr-grpo": dr_grpo, "rloo": rloo}


def estimator(name: str) -> Estimator:
    """An estimator by name."""
    if name not in ESTIMATORS:
        raise UserError(f"unknown estimator '{name}' in train.advantage; {did_you_mean(name, ESTIMATORS)}")
    return ESTIMATORS[name]


def span_advantages(group: Sequence[Credit | None], estimate: Estimator) -> list[list[float | None]]:
    """Advantages of every span of every reply of a group.

    Each combination of reward parts is estimated over the group on its own: in classmate training the kept thoughts
    compete by main + classmate, all other tokens by main alone. A reply takes part in a combination's statistics
    whether or not it has such a span itself.
    """
    combinations = {span.parts for credit in group if credit is not None for span in credit.spans}
    by_parts: dict[tuple[str, ...], list[float | None]] = {}
    for parts in combinations:
        totals = [
            credit.total(parts).value if credit is not None and all(name in credit.parts for name in parts) else None
            for credit in group
        ]
        by_parts[parts] = estimate(totals)
    return [
        [] if credit is None else [by_parts[span.parts][member] for span in credit.spans]
        for member, credit in enumerate(group)
    ]


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float = 1.0, lam: float = 0.95
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimation over the sampled tokens of one episode: advantages and value targets."""
    advantages = [0.0] * len(rewards)
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        running = rewards[t] + gamma * after - values[t] + gamma * lam * running
        advantages[t] = running
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]
