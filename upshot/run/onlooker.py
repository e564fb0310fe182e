"""The run folder as ranks other than the first see it: they read what is there and write nothing. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from upshot.config.recipe import Recipe
from upshot.rollout.rollout import Rollout
from upshot.run.checkpoints import Checkpoints
from upshot.run.folder import RunFolder
from upshot.training.metrics.best import BestMark


class ReadOnlyRunFolder(RunFolder):
    """Reads a run folder that another rank writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.checkpoints = _Unwritten(path)

    def locked(self, say: Callable[[str], None]) -> AbstractContextManager[None]:
        """The first rank holds the folder."""
        return nullcontext()

    def write_recipe(self, recipe: Recipe) -> None:
        """Nothing."""

    def metrics(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def rollouts(self, replies: Iterable[Mapping[str, Any]]) -> None:
        """Nothing."""

    def samples(self, step: int, replies: Sequence[Rollout]) -> None:
        """Nothing."""

    def drop_failed_start(self) -> None:
        """Nothing."""

    def status(self, state: str, **more: Any) -> None:
        """Nothing."""

    def write_spent(self, spent: Mapping[str, float]) -> None:
        """Nothing."""

    def rewind(self, phases: list[str], phase: str, step: int) -> None:
        """Nothing."""


class _Unwritten(Checkpoints):
    def save(
        self, phase: str, step: int, keep: int, write: Callable[[Path], None], best: BestMark | None = None
    ) -> Path:
        """The place of the checkpoint that the first rank writes."""
        return self.path / f"{phase}-{step:06d}"
