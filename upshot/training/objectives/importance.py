"""Importance sampling between sampler and learner.

Sampler and learner compute the same model with other kernels, or the sampler is a few versions behind: the probability
that a token was drawn with is not quite the learner's. With `train.importance` the learner's own log-probabilities
before the first update are what the ratio of the policy gradient is to (`Datum.old`), and each token's loss is weighed
by learner / sampler, cut at bounds. Without it, the sampler's count as the learner's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from upshot.config.recipe import ImportanceConfig
from upshot.training.learner.batch import Datum
from upshot.training.objectives.logprob_source import LogprobSource
from upshot.training.objectives.mismatch import drift_of


def weigh(learner: LogprobSource, data: Sequence[Datum]) -> dict[str, float]:
    """Set `old` and `weights` of the data where the recipe asks for it; what to log."""
    config = learner.config.importance
    if config.rule == "none":
        return {}
    found: list[float] = []
    gaps: list[float] = []
    for datum, own in zip(data, learner.logprobs(data), strict=True):
        differences = [own[i] - datum.old[i] for i in datum.places]
        ratios = importance(differences, config.level)
        gaps, found = gaps + differences, found + ratios
        datum.old, datum.weights = own, [0.0] * len(datum.ids)
        for place, ratio in zip(datum.places, ratios, strict=True):
            datum.weights[place] = cut(ratio, config)
    if not found:
        return {}
    outside = sum(not config.low <= ratio <= config.high for ratio in found)
    return {
        "policy/importance": math.fsum(found) / len(found),
        "policy/importance_max": max(found),
        "policy/importance_cut": outside / len(found),
        **drift_of(gaps),
    }


def importance(differences: Sequence[float], level: str) -> list[float]:
    """exp(learner - sampler) of each token of a sequence; level 'sequence': that of all its tokens together."""
    if level == "token":
        return [_exp(x) for x in differences]
    return [_exp(math.fsum(differences))] * len(differences)


def cut(ratio: float, config: ImportanceConfig) -> float:
    """A ratio inside the bounds, or what the rule makes of one outside."""
    if config.low <= ratio <= config.high:
        return ratio
    return 0.0 if config.rule == "mask" else min(max(ratio, config.low), config.high)


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))
