"""Scores of a reply's futures → one reward, with its breakdown. Pure functions.

Per metric: the mean over the futures that have a value, times the weight, clamped; then summed. A metric without any
value makes the reply's reward missing: adding up the rest would compare sums of different things.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from upshot.core.score import Score, mean_score

CLAMP = (-1.0, 1.0)
"""Bounds of a metric's term where nothing else is said outside of recipes, as the paper has them."""


@dataclass(frozen=True, slots=True)
class MetricWeight:
    """How one metric enters the reward."""

    weight: float = 1.0
    """0 logs the metric without rewarding it."""
    clamp: tuple[float, float] | None = None
    """Bounds of weight × mean; None leaves it unbounded."""
    intrinsic: bool = False
    tokens: str = "all"
    """Which tokens earn it: all, or those of the 'thought' or the 'answer', as a part of its own."""


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of one reply, and where it comes from."""

    total: Score
    terms: Mapping[str, Score] = field(default_factory=dict)
    """Per metric: weight × mean over futures, clamped; or missing."""
    means: Mapping[str, Score] = field(default_factory=dict)
    """Per metric: the plain mean over futures."""
    extrinsic: float = 0.0
    """Sum of the present terms about what was achieved."""
    intrinsic: float = 0.0
    """Sum of the present terms about how it was said."""


def combine(futures: Sequence[Mapping[str, Score]], weights: Mapping[str, MetricWeight]) -> Reward:
    """The reward of a reply from the metric scores of its futures."""
    means: dict[str, Score] = {}
    terms: dict[str, Score] = {}
    total, sums = Score(0.0), {False: 0.0, True: 0.0}
    for name, how in weights.items():
        mean = mean_score([scores[name] for scores in futures if name in scores], f"{name}: no future")
        means[name] = terms[name] = mean
        if mean.value is not None:
            low, high = how.clamp or (-math.inf, math.inf)
            terms[name] = Score(min(max(mean.value * how.weight, low), high))
        if how.weight:
            sums[how.intrinsic] += terms[name].value or 0.0
            if mean.value is None and total.value is not None:
                total = Score(None, mean.reason, {**mean.detail, "metric": name})
    if total.value is not None:
        total = Score(sums[False] + sums[True])
    return Reward(total, terms, means, extrinsic=sums[False], intrinsic=sums[True])
