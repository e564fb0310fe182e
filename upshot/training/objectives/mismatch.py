"""Sampler and learner compute one model twice: how far apart they are (drift), and weighing by it (importance).

Before a step's first update both have the same weights: what is left is rounding (other kernels, merged adapters), or a
fault. Steps played ahead are a few versions behind as well. Importance ratios and clipping see all of it as a change of
the policy. With `train.importance` the learner's own log-probabilities before the first update are what the ratio of
the policy gradient is to (`Datum.old`), and each token's loss is weighed by learner / sampler, cut at bounds. Without
it, the sampler's count as the learner's own. A step's only update needs no forward of its own for that: it computes
them anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from upshot.config.recipe import ImportanceConfig, TrainConfig
from upshot.training.learner.batch import Datum, TrainBatch
from upshot.training.learner.distributed.ranks import ALONE, Ranks

MEAN, LARGEST = "policy/drift", "policy/drift_max"
"""How the drift is logged."""
RATIO, RATIO_MAX, RATIO_CUT = "policy/importance", "policy/importance_max", "policy/importance_cut"
"""How the ratios are: their mean, the largest, the share out of bounds."""


class LogprobSource(Protocol):
    """What a learner says of data without learning from them: ours, or numbers that another program's has told."""

    @property
    def config(self) -> TrainConfig:
        """How the policy learns."""

    def logprobs(self, data: Sequence[Datum], reference: bool = False) -> list[list[float]]:
        """Log-probabilities of the trained tokens beside the ids, 0 elsewhere; of the policy or the reference."""

    def values(self, data: Sequence[Datum]) -> list[list[float]]:
        """The value head's estimate before each trained token of the data."""


class MismatchMeter:
    """Sees in passing how far the log-probabilities of a gradient's forward are from the sampled ones."""

    def __init__(self, importance: ImportanceConfig | None = None) -> None:
        self.importance = importance
        """How tokens are weighed by the log-probabilities of this forward; None: they are weighed already, or not."""
        self._gaps: list[Tensor] = []
        """Of each micro-batch: how many tokens, the sum of their differences, the largest; where they are weighed, the
        sum of the ratios, the largest, how many are out of bounds."""

    def watch(self, batch: TrainBatch, own: Tensor) -> TrainBatch:
        """Take note of a micro-batch; as it is, or weighed by the learner's `own` log-probabilities [M]."""
        if not len(own):
            return batch
        differences = own - batch.columns["old"]
        gap = differences.abs()
        seen = [torch.full_like(gap[0], len(gap)), gap.sum(), gap.amax()]
        if self.importance is not None:
            ratios, weights, outside = weigh_tokens(batch, differences, self.importance)
            seen += [ratios.sum(), ratios.amax(), outside.sum().to(ratios)]
            batch = replace(batch, columns={**batch.columns, "old": own, "weights": weights})
        self._gaps.append(torch.stack(seen))
        return batch

    def drift(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Mean and largest difference, and what was made of it, over all ranks; nothing where nothing was sampled."""
        own = [gap.tolist() for gap in self._gaps]  # at the end: the device is not waited for in between
        rows = [row for part in ranks.all_gather_object("drift", own) for row in part]
        if not rows:
            return {}
        count, gaps, largest, *of_ratios = zip(*rows, strict=True)
        found = {MEAN: sum(gaps) / sum(count), LARGEST: max(largest)}
        if of_ratios:
            ratios, highest, outside = of_ratios
            found[RATIO], found[RATIO_MAX] = sum(ratios) / sum(count), max(highest)
            found[RATIO_CUT] = sum(outside) / sum(count)
        return found


def logged_drift(logs: Mapping[str, float]) -> dict[str, float]:
    """The drift that is logged already: `weigh` looks at it before it forgets the sampler's numbers."""
    return {name: logs[name] for name in (MEAN, LARGEST) if name in logs}


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
        gaps.extend(abs(difference) for difference in differences)
        found.extend(ratios)
        datum.old, datum.weights = own, [0.0] * len(datum.ids)
        for place, ratio in zip(datum.places, ratios, strict=True):
            datum.weights[place] = cut(ratio, config)
    if not found:
        return {}
    outside = sum(not config.low <= ratio <= config.high for ratio in found)
    return {
        RATIO: math.fsum(found) / len(found),
        RATIO_MAX: max(found),
        RATIO_CUT: outside / len(found),
        MEAN: math.fsum(gaps) / len(gaps),
        LARGEST: max(gaps),
    }


def weigh_tokens(batch: TrainBatch, differences: Tensor, config: ImportanceConfig) -> tuple[Tensor, Tensor, Tensor]:
    """`importance` and `cut` of a micro-batch's trained tokens [M]: ratios, weights, and which are out of bounds."""
    if config.level == "sequence":
        differences = batch.sums(differences)[batch.owner]
    ratios = differences.clamp(max=80.0).exp()  # float32 ends there
    outside = (ratios < config.low) | (ratios > config.high)
    weights = ratios.clamp(config.low, config.high)
    return ratios, weights.masked_fill(outside, 0.0) if config.rule == "mask" else weights, outside


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
