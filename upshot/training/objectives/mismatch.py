"""Sampler and learner compute one model twice: how far apart they are (drift), and weighing by it (importance).

Before a step's first update both have the same weights: what is left is rounding (other kernels, merged adapters), or a
fault. Steps played ahead are a few versions behind as well. Importance ratios and clipping see all of it as a change of
the policy. With `train.importance` the learner's own log-probabilities before the first update are what the ratio of
the policy gradient is to (`Datum.old`), and each token's loss is weighed by learner / sampler, cut at bounds. Without
it, the sampler's count as the learner's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from upshot.config.recipe import ImportanceConfig, TrainConfig
from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch
from upshot.training.learner.distributed.ranks import ALONE, Ranks
from upshot.training.objectives.objectives import Objective

MEAN, LARGEST = "policy/drift", "policy/drift_max"
"""How the drift is logged."""


class LogprobSource(Protocol):
    """What a learner says of data without learning from them: ours, or numbers that another program's has told."""

    @property
    def config(self) -> TrainConfig:
        """How the policy learns."""

    def logprobs(self, data: Sequence[Datum], reference: bool = False) -> list[list[float]]:
        """Log-probabilities of the trained tokens beside the ids, 0 elsewhere; of the policy or the reference."""

    def values(self, data: Sequence[Datum]) -> list[list[float]]:
        """The value head's estimate before each trained token of the data."""


class MismatchObjective(Objective):
    """An objective that also sees how far its log-probabilities are from the sampled ones."""

    def __init__(self, inner: Objective) -> None:
        self.inner = inner
        self.needs_values, self.needs_entropy, self.dropout = inner.needs_values, inner.needs_entropy, inner.dropout
        self._gaps: list[Tensor] = []
        """Of each micro-batch: how many tokens, the sum of their differences, the largest."""

    def begin(self, data: Sequence[Datum], max_tokens: int, mode: str) -> None:
        """See `Objective`."""
        self._gaps.clear()
        self.inner.begin(data, max_tokens, mode)

    def loss(self, batch: TrainBatch, found: ForwardOutput) -> tuple[Tensor, dict[str, float]]:
        """The objective's own."""
        if "old" in batch.columns and len(batch.columns["old"]):
            gap = (found.logprobs.detach() - batch.columns["old"]).abs()
            self._gaps.append(torch.stack([torch.full_like(gap[0], len(gap)), gap.sum(), gap.amax()]))
        return self.inner.loss(batch, found)

    def weight(self, name: str) -> float:
        """The objective's own."""
        return self.inner.weight(name)

    def drift(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Mean and largest difference since `begin`, over all ranks; nothing where nothing was sampled."""
        own = [gap.tolist() for gap in self._gaps]  # at the end: the device is not waited for in between
        rows = [row for part in ranks.all_gather_object("drift", own) for row in part]
        if not rows:
            return {}
        count = sum(row[0] for row in rows)
        return {MEAN: sum(row[1] for row in rows) / count, LARGEST: max(row[2] for row in rows)}


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
        "policy/importance": math.fsum(found) / len(found),
        "policy/importance_max": max(found),
        "policy/importance_cut": outside / len(found),
        MEAN: math.fsum(gaps) / len(gaps),
        LARGEST: max(gaps),
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
