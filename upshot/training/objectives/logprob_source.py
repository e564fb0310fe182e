"""What a learner says of data without learning from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from upshot.config.recipe import TrainConfig
from upshot.rollout.rollout import Rollout
from upshot.training.learner.batch import Datum

Lesson = list[tuple[Rollout, Datum]]
"""What is learned from a step's replies, each sequence with the reply that it is of."""


class LogprobSource(Protocol):
    """A learner, or numbers that another program's learner has told."""

    @property
    def config(self) -> TrainConfig:
        """How the policy learns."""

    def logprobs(self, data: Sequence[Datum], reference: bool = False) -> list[list[float]]:
        """Log-probabilities of the trained tokens beside the ids, 0 elsewhere; of the policy or the reference."""

    def values(self, data: Sequence[Datum]) -> list[list[float]]:
        """The value head's estimate before each trained token of the data."""
