"""Token drift: how far the sampler's log-probabilities are from the learner's, on the tokens of a step.

Before the step's first update both have the same weights: what is left is rounding (other kernels, merged adapters),
or a fault. Importance ratios and clipping see it as a change of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch
from upshot.training.learner.distributed.ranks import ALONE, Ranks
from upshot.training.objectives.objectives import Objective


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

    def drift(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Mean and largest difference since `begin`, over all ranks; nothing where nothing was sampled."""
        own = [gap.tolist() for gap in self._gaps]  # at the end: the device is not waited for in between
        rows = [row for part in ranks.all_gather_object("drift", own) for row in part]
        if not rows:
            return {}
        count = sum(row[0] for row in rows)
        return told(sum(row[1] for row in rows) / count, max(row[2] for row in rows))


def told(mean: float, largest: float) -> dict[str, float]:
    """What is logged."""
    return {"policy/drift": mean, "policy/drift_max": largest}


def drift_of(differences: Sequence[float]) -> dict[str, float]:
    """Drift of given differences; nothing where there are none."""
    sizes = [abs(difference) for difference in differences]
    return told(math.fsum(sizes) / len(sizes), max(sizes)) if sizes else {}


def known(logs: Mapping[str, float]) -> dict[str, float]:
    """The drift that is logged already: importance weights look at it before they forget the sampler's numbers."""
    return {name: logs[name] for name in told(0.0, 0.0) if name in logs}
