"""Computes what verl's learner gets for each row, with local mode's own functions, from the step's replies.

verl computes log-probabilities and values. From these and the replies, this file computes advantages, value targets and
importance for all rows of the step at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from upshot.config.method import method_of
from upshot.config.recipe import TrainConfig
from upshot.rollout.reply import Branch, Rollout
from upshot.training.learner.batch import Datum
from upshot.training.loops import ppo, rl
from upshot.training.objectives.objectives import LARGEST, MEAN


@dataclass(frozen=True)
class BatchRow:
    """A row of verl's batch: whose words it holds, how many of their ids, and verl's numbers for the response."""

    source: Rollout | Branch
    ids: int
    """The number of ids of prompt and response together."""
    logprobs: Sequence[float] = ()
    """Log-probabilities by the learner, before its first update of the step."""
    reference: Sequence[float] = ()
    values: Sequence[float] = ()
    entropy: Sequence[float] = ()
    """Entropy of the whole distribution, if the recipe has a bonus for it."""

    @property
    def key(self) -> tuple[int, ...]:
        """The row's ids: rows with the same ids have the same log-probabilities and values."""
        return tuple(self.source.conversation.ids[: self.ids])


@dataclass(frozen=True)
class LearnerInputs:
    """What the learner gets for a row; all lists are aligned with its response."""

    mask: list[int]
    advantages: list[float]
    old: list[float]
    """The log-probabilities in the denominator of the policy gradient's ratio."""
    returns: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    scale: float = 1.0
    """A factor for its advantages, because verl counts all rows equally (`_scale`)."""

    @property
    def scaled(self) -> list[float]:
        """The advantages that verl gets."""
        return [self.scale * advantage for advantage in self.advantages]


class MeasuredLogprobs:
    """verl's numbers, in place of local mode's learner (`LogprobSource`)."""

    def __init__(self, config: TrainConfig, rows: Sequence[BatchRow]) -> None:
        self.config = config
        self._rows = {row.key: row for row in rows}

    def logprobs(self, data: Sequence[Datum], reference: bool = False) -> list[list[float]]:
        """Log-probabilities of the trained tokens; a reply without a row keeps its own, so that its divergence is 0."""
        return [self._beside(datum, "reference" if reference else "logprobs", datum.old) for datum in data]

    def values(self, data: Sequence[Datum]) -> list[list[float]]:
        """The critic's values of the trained tokens."""
        return [self._beside(datum, "values", [0.0] * len(datum.ids)) for datum in data]

    def _beside(self, datum: Datum, what: str, otherwise: list[float]) -> list[float]:
        row = self._rows.get(tuple(datum.ids))
        if row is None:
            return otherwise
        measured = list(getattr(row, what))
        whole = [0.0] * (len(datum.ids) - len(measured)) + measured
        return [value if bit else 0.0 for value, bit in zip(whole, datum.mask, strict=True)]


def teach(
    config: TrainConfig, groups: Sequence[Sequence[Rollout]], rows: Sequence[BatchRow]
) -> tuple[list[LearnerInputs], dict[str, float]]:
    """The learner's inputs for each row, and numbers to log; sets the advantages of the replies."""
    training_data = ppo.training_data if method_of(config.method).value_head else rl.training_data
    units, logs = training_data(MeasuredLogprobs(config, rows), groups)
    data = [datum for unit in units for datum in unit]
    datum_of = {(id(datum.source), len(datum.ids)): datum for datum in data}
    scale = _scale(config, data)
    logs["train/sequences"] = float(len(data))
    logs["train/tokens"] = float(sum(sum(datum.mask) for datum in data))
    inputs = [_describe_row(row, datum_of, scale) for row in rows]
    return inputs, measure_tokens(rows, inputs) | logs  # the drift measured for importance takes precedence


def _scale(config: TrainConfig, data: Sequence[Datum]) -> float:
    """The factor by which verl's mean over a step's rows is smaller than local mode's, which does not count branches.

    A factor of the surrogate is the same as a factor of the advantages, so it is applied to them.
    """
    norm = "sequence" if config.loss.name == "gspo" else config.length_norm  # the only one in verl's gspo
    sizes = [(sum(datum.mask) if norm == "token" else 1, datum.counted) for datum in data]
    counted = sum(size for size, is_counted in sizes if is_counted)
    return sum(size for size, _ in sizes) / counted if counted else 1.0


def measure_tokens(rows: Sequence[BatchRow], inputs: Sequence[LearnerInputs]) -> dict[str, float]:
    """Local mode's metrics of the trained tokens before the first update of the step: entropy and drift."""
    import numpy as np

    masks = [np.asarray(each.mask, dtype=bool) for each in inputs]
    if not any(mask.any() for mask in masks):
        return {}

    def trained(lists: Sequence[Sequence[float]]) -> np.ndarray:
        return np.concatenate([np.asarray(row, dtype=float)[mask] for row, mask in zip(lists, masks, strict=True)])

    now = trained([row.logprobs for row in rows])
    gaps = np.abs(now - trained([each.old for each in inputs]))
    entropy = trained([row.entropy for row in rows]) if all(row.entropy for row in rows) else -now
    return {"policy/entropy": float(entropy.mean()), MEAN: float(gaps.mean()), LARGEST: float(gaps.max())}


def _describe_row(row: BatchRow, datum_of: Mapping[tuple[int, int], Datum], scale: float) -> LearnerInputs:
    first = row.ids - len(row.logprobs)
    datum = datum_of.get((id(row.source), row.ids))
    if datum is None:  # a user's own estimator gave its tokens no advantage
        empty = [0.0] * len(row.logprobs)
        return LearnerInputs([0] * len(row.logprobs), empty, list(row.logprobs), empty, empty)
    lists = {name: list(getattr(datum, name)[first:]) for name in ("mask", "advantages", "old", "returns", "weights")}
    return LearnerInputs(**lists, scale=datum.share * scale)
