"""A run on verl, told as local mode tells its own: rollouts, lines, status, console and trackers, step by step.

verl logs a step when everything of it is done; the replies that its trainer learned from (`rollout_exchange.py`) lie
ready then. They are written before the step's line, so a line in metrics.jsonl means that the step is all there.
"""

from __future__ import annotations

import time
from typing import Any

from upshot.config.phases import phases_of
from upshot.config.recipe import Recipe
from upshot.run.folder import RunFolder
from upshot.run.reporter import Reporter
from upshot.run.samples import Pieces
from upshot.run.trackers import make_trackers
from upshot.run.writer import Writer
from upshot.tasks.base import Task
from upshot.training.metrics.best import ONLY
from upshot.verl.folder import rollout_exchange
from upshot.verl.metrics import Follower, line_of


class VerlRunWriter:
    """Writes the run folder of a run that verl makes."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        follower: Follower,
        task: Task,
        pieces: Pieces,
        reporter: Reporter | None = None,
    ) -> None:
        self.recipe = recipe
        self.folder = folder
        self.follower = follower
        self.reporter = reporter or Reporter()
        self.phase = recipe.train.method
        trackers = make_trackers(recipe.trackers, folder.path, recipe.model_dump(mode="json"))
        self.writer = Writer(recipe, folder, self.reporter, task, pieces, trackers)
        self._last = time.perf_counter()

    def begin(self, steps: int, done: int) -> None:
        """The run begins, or goes on after `done` steps: what was written after them is dropped, as they come again."""
        if self.folder.path.joinpath(rollout_exchange.FOLDER).is_dir() or self.follower.path.is_file():
            self.writer.set_phase(self.phase, steps, done)
            self._catch_up(done)
        self.folder.rewind(phases_of(self.recipe), self.phase, done or -1)
        self._last = time.perf_counter()
        self.writer.begin(self.phase, steps, done)

    def follow(self) -> int:
        """Write down the steps that verl has finished since the last call; how many records it told."""
        records = self.follower.new()
        for record in records:
            self._tell(record)
        return len(records)

    def _catch_up(self, done: int) -> None:
        """Write down what a killed launcher had not yet, up to the checkpoint; the rest of it goes."""
        known = {line["step"] for line in self.folder.lines(self.phase)}
        records = {record["step"]: record for record in self.follower.new()}
        for step in rollout_exchange.steps(self.folder.path):
            records.setdefault(step, {"step": step, "data": {}})  # it was killed between the checkpoint and its line
        for step in sorted(records):
            if step <= done and step not in known:
                self._tell(records[step])
        for step in rollout_exchange.steps(self.folder.path):
            rollout_exchange.drop(self.folder.path, step)
        self.follower.forget()

    def _tell(self, record: dict[str, Any]) -> None:
        """A record of verl's: a step's line, and a line of its own for an evaluation after it."""
        step, told = int(record["step"]), line_of(record)
        evaluation = {name: told.pop(name) for name in list(told) if name.startswith(ONLY)}
        groups = rollout_exchange.read(self.folder.path, step)
        if groups or any(name.startswith(("train/", "loss/")) for name in told):
            logs = {"time/step": self._took(), **told, **self.writer.write_replies(step, groups)}
            self.writer.write_line(step, logs)
            self.writer.announce(step, logs)
        if evaluation:
            self.writer.write_line(step, evaluation)
            self.writer.announce(step, evaluation)
        rollout_exchange.drop(self.folder.path, step)

    def _took(self) -> float:
        """Seconds since the last step's line, for those of verl's trainers that do not say."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before
