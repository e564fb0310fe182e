"""What a loop needs of the run that it is part of: where it stands, its models, and where a finished step goes.

`run/run.py` is the one that implements it; a loop knows nothing of folders, checkpoints or signals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.conversation import Row
from upshot.models.rendering import Renderer
from upshot.rollout.context import RolloutContext
from upshot.rollout.rollout import Rollout
from upshot.rollout.services import Services
from upshot.tasks.base import Task
from upshot.training.learner.distributed.ranks import Ranks
from upshot.training.learner.learner import Learner
from upshot.training.metrics.best import BestMark
from upshot.training.metrics.throughput import ThroughputMeter
from upshot.training.policy import PolicyBundle

Logs = dict[str, float]


class LoopRun(Protocol):
    """A run as its loops see it."""

    recipe: Recipe
    ranks: Ranks
    phase: str
    step: int
    task: Task
    loaded: PolicyBundle
    meter: ThroughputMeter
    services_now: Services | None

    @property
    def renderer(self) -> Renderer:
        """Messages → ids of the model in training."""

    def say(self, text: str) -> None:
        """Tell whoever watches."""

    def within(self, done: int, total: int) -> None:
        """Tell how far the step under way is."""

    def lines(self, step: int | None = None) -> Sequence[Mapping[str, Any]]:
        """What metrics.jsonl has of this phase, or of one step of it."""

    def resolve_steps(self, config: TrainConfig, examples: int) -> TrainConfig:
        """The configuration with its epochs counted in steps."""

    def filter_rows(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows whose prompt leaves room for a reply."""

    def services(self) -> AbstractAsyncContextManager[tuple[Services, RolloutContext]]:
        """Helper models, user and metrics, started, with the context they play in; closed at the end."""

    def learner(self, config: TrainConfig, value_head: bool = False) -> Learner:
        """A learner on the policy, restored when this phase is being resumed."""

    def keep_reference(self, learner: Learner) -> None:
        """Give the learner the model that this phase began with."""

    def begin(self, learner: Learner, config: TrainConfig) -> None:
        """The phase's learner is ready: from here on Ctrl-C saves."""

    def count(self) -> None:
        """All that the step under way asked of helpers is done."""

    def step_done(self, step: int, logs: Logs, groups: Sequence[Sequence[Rollout]] = ()) -> None:
        """Write a finished step down, and a checkpoint when it is time."""

    def tell(self, logs: Logs) -> None:
        """Write a line of nothing but an evaluation."""

    def checkpoint(self, best: BestMark | None = None) -> None:
        """Save the run as it was after its last finished step."""
