"""Sampler and learner compute one model twice: how far apart they are (drift), and weighing by it (importance).

Before a step's first update both have the same weights: what is left is rounding (other kernels, merged adapters), or a
fault. Steps played ahead are a few versions behind as well. Importance ratios and clipping see all of it as a change of
the policy. With `train.importance` the learner's own log-probabilities before the first update are what the ratio of
the policy gradient is to (`Datum.old`), and each token's loss is weighed by learner / sampler, cut at bounds; the
sampler's stay beside them (`Datum.sampled`). Without it, the sampler's count as the learner's own. A step's only update
needs no forward of its own for that: it computes them anyway.
"""

from __future__ import annotations

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
    """What a learner says of data without learning from them: ours, or numbers that another program's has computed."""

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
        """Of each micro-batch: `measure_gaps`."""

    def watch(self, batch: TrainBatch, logprobs: Tensor) -> TrainBatch:
        """Take note of a micro-batch; as it is, or weighed by the learner's log-probabilities [M]."""
        if not len(logprobs):
            return batch
        sampled = batch.columns["old"]
        differences = logprobs - sampled
        if self.importance is None:
            self._gaps.append(measure_gaps(differences))
            return batch
        weights, gaps = weigh_tokens(differences, batch.sums(differences)[batch.owner], self.importance)
        self._gaps.append(gaps)
        return replace(batch, columns={**batch.columns, "old": logprobs, "sampled": sampled, "weights": weights})

    def drift(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Mean and largest difference, and what was made of it, over all ranks; nothing where nothing was sampled."""
        of_rank = [gap.tolist() for gap in self._gaps]  # at the end: the device is not waited for in between
        return join_gaps([row for rows in ranks.all_gather_object("drift", of_rank) for row in rows])


def logged_drift(logs: Mapping[str, float]) -> dict[str, float]:
    """The drift that is logged already, by `weigh`."""
    return {name: logs[name] for name in (MEAN, LARGEST) if name in logs}


def weigh(learner: LogprobSource, data: Sequence[Datum]) -> dict[str, float]:
    """Set `old`, `sampled` and `weights` of the data where the recipe asks for it; what to log."""
    config = learner.config.importance
    if config.rule == "none":
        return {}
    gaps: list[list[float]] = []
    for datum, logprobs in zip(data, learner.logprobs(data), strict=True):
        places = datum.places
        datum.sampled, datum.old, datum.weights = datum.old, logprobs, [0.0] * len(datum.ids)
        if places:
            differences = torch.tensor([logprobs[i] - datum.sampled[i] for i in places], dtype=torch.float64)
            weights, measured = weigh_tokens(differences, differences.sum().expand(len(places)), config)
            gaps.append(measured.tolist())
            for place, weight in zip(places, weights.tolist(), strict=True):
                datum.weights[place] = weight
    return join_gaps(gaps)


def weigh_tokens(differences: Tensor, of_sequence: Tensor, config: ImportanceConfig) -> tuple[Tensor, Tensor]:
    """The weight of each token, learner / sampler within bounds, and what `measure_gaps` says of the ratios.

    differences: learner - sampler in log-probability, by token. of_sequence: the sum of those of the token's sequence.
    """
    ratios = (of_sequence if config.level == "sequence" else differences).clamp(max=80.0).exp()  # float32 ends there
    outside = (ratios < config.low) | (ratios > config.high)
    weights = ratios.clamp(config.low, config.high)
    weights = weights.masked_fill(outside, 0.0) if config.rule == "mask" else weights
    return weights, measure_gaps(differences, ratios, outside)


def measure_gaps(differences: Tensor, ratios: Tensor | None = None, outside: Tensor | None = None) -> Tensor:
    """Tokens, the sum of their differences, the largest; of ratios their sum, the largest, how many are outside."""
    gap = differences.abs()
    numbers = [torch.full_like(gap[0], len(gap)), gap.sum(), gap.amax()]
    if ratios is not None and outside is not None:
        numbers += [ratios.sum(), ratios.amax(), outside.sum().to(ratios)]
    return torch.stack(numbers)


def join_gaps(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """What to log of several `measure_gaps`."""
    if not rows:
        return {}
    count, gaps, largest, *of_ratios = zip(*rows, strict=True)
    logs = {MEAN: sum(gaps) / sum(count), LARGEST: max(largest)}
    if of_ratios:
        ratios, highest, outside = of_ratios
        logs |= {RATIO: sum(ratios) / sum(count), RATIO_MAX: max(highest), RATIO_CUT: sum(outside) / sum(count)}
    return logs
