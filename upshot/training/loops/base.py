"""What a loop needs from its run: how far it is, its models, and where a finished step is written.

`run/run.py` implements it. A loop knows nothing of folders, checkpoints or signals.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from upshot.config.recipe import Recipe, TrainConfig
from upshot.rollout.play import RolloutContext
from upshot.rollout.reply import Rollout
from upshot.rollout.services import Services
from upshot.tasks.base import Task
from upshot.training.bundle import PolicyBundle
from upshot.training.learner.distributed.ranks import Ranks
from upshot.training.learner.learner import Learner
from upshot.training.metrics.best import BestMark

Logs = dict[str, float]


class LoopRun(Protocol):
    """A run as its loops see it."""

    recipe: Recipe
    task: Task
    policy: PolicyBundle
    ranks: Ranks
    phase: str
    step: int
    """Steps of the phase that are finished."""

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint that this phase is resumed from; None if it begins here."""

    say: Callable[[str], None]
    """Show a line to the person who watches the run."""
    show_progress: Callable[[int, int], None]
    """Report progress within a step: replies played, and replies in all."""
    pause_helpers: Callable[[], Awaitable[None]]
    """Called when the current step is played: what its helpers have counted goes into its line, and they free memory
    for the learner."""

    def lines(self, step: int | None = None) -> Sequence[Mapping[str, Any]]:
        """What metrics.jsonl has of this phase, or of one step of it."""

    def open_services(self) -> AbstractAsyncContextManager[tuple[Services, RolloutContext]]:
        """Helper models, user and metrics, started, with the context they play in; closed at the end."""

    def begin(self, learner: Learner, config: TrainConfig) -> None:
        """The phase's learner is ready: from here on Ctrl-C saves."""

    def step_done(self, step: int, logs: Logs, groups: Sequence[Sequence[Rollout]] = ()) -> None:
        """Write a finished step down, and a checkpoint when it is time."""

    def write_evaluation(self, logs: Logs) -> None:
        """Write a line of nothing but an evaluation."""

    def checkpoint(self, best: BestMark | None = None) -> None:
        """Save the run as it was after its last finished step."""
