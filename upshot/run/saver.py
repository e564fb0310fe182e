"""Checkpoints in the background: a thread writes what was copied, one at a time, while training goes on. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from upshot.config.recipe import TrainConfig
from upshot.run.checkpoints import Checkpoints
from upshot.training.metrics.best import BestMark


class Saver:
    """Writes the checkpoints of a run; what goes wrong there is raised here."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None
        self._last = time.monotonic()
        self._waited = 0.0

    def due(self, step: int, config: TrainConfig) -> bool:
        """Whether a checkpoint is to be saved after this step."""
        if step >= config.steps:
            return False  # the phase's end saves
        by_steps = bool(config.save.every) and step % config.save.every == 0
        return by_steps or (bool(config.save.minutes) and time.monotonic() - self._last >= 60 * config.save.minutes)

    def save(
        self, phase: str, step: int, keep: int, copy: Callable[[], Callable[[Path], None]], best: BestMark | None = None
    ) -> None:
        """Copy what a checkpoint holds and have it written; the one before is waited for."""
        started = time.perf_counter()
        self.wait()
        write = copy()
        self._writing = self._pool.submit(self.checkpoints.save, phase, step, keep, write, best)
        self._last = time.monotonic()
        self._waited += time.perf_counter() - started

    def check(self) -> None:
        """Raise what went wrong in a checkpoint that has ended."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Return when all that was begun is on the disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def spent(self) -> float:
        """Seconds that training stood still for checkpoints since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """No more checkpoints."""
        self._pool.shutdown()
