"""Writes the run folder of a run on verl, in the process of verl's trainer, which has replies, metrics and recipe.

As in local mode, a step's line is written after its update and before its checkpoint is saved: so even after a kill, a
checkpoint has all lines up to its step. The time for saving is in the next line. The user's command only reads what is
written here (`RunEcho`).
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.config.recipe import Recipe
from upshot.core.files import write_json
from upshot.rollout.credit.rules import credit_rule
from upshot.rollout.reply import Rollout
from upshot.rollout.services import Services
from upshot.run.console import Reporter
from upshot.run.folder import METRICS, RunFolder
from upshot.run.report.lines import LogTail
from upshot.run.samples import Pieces
from upshot.run.trackers import make_trackers
from upshot.run.writer import Writer
from upshot.tasks.base import Task
from upshot.training.learner.distributed.ranks import add_counts
from upshot.training.metrics.alarms import Alarms
from upshot.verl.checkpoints import saved_steps
from upshot.verl.checks.watchdog import MARK
from upshot.verl.table import METRICS as METRIC_NAMES

COUNTERS = "counters.json"
"""The file in a checkpoint with the helpers' counters."""
Counted = Mapping[str, tuple[int, Mapping[str, Any]]]
"""By worker: the number of replies it had played, and its helpers' counters at that time."""


class StepRecorder:
    """Writes the run folder in the process of verl's trainer."""

    def __init__(self, recipe: Recipe, folder: RunFolder, task: Task, pieces: Pieces) -> None:
        self.folder = folder
        self.phase = recipe.train.method
        self.keep = max(recipe.train.save.keep, 2)  # verl removes the old one before the new one is complete
        trackers = make_trackers(recipe.trackers, folder.path, recipe.model_dump(mode="json"))
        self.writer = Writer(recipe, folder, Reporter(), task, pieces, trackers)
        self._workers: dict[str, Mapping[str, Any]] = {}
        """The last reported total counters of each worker; under '' those from before a resume."""
        self._saving = 0.0
        """Seconds spent on saving since the last line."""

    def begin(self, steps: int, done: int) -> None:
        """Start the run, or continue it after `done` steps."""
        counters = self._checkpoint(done) / COUNTERS
        self._workers = {"": json.loads(counters.read_text())} if counters.is_file() else {}
        self.writer.begin(self.phase, steps, done)

    @property
    def _counters(self) -> dict[str, Any]:
        """The counters of all helpers, over all workers and resumes."""
        return add_counts({}, list(self._workers.values()))

    def count(self, counted: Counted, services: Services) -> dict[str, float]:
        """Calls, cost, retries and quality of the helpers of all workers, under local mode's names.

        `services` were never started: they only convert counters to numbers.
        """
        self._workers |= {worker: counters for worker, (_, counters) in counted.items()}
        services.restore(self._counters)
        return services.stats()

    def write_step(
        self, step: int, logs: Mapping[str, float], groups: Sequence[Sequence[Rollout]], spent: Mapping[str, float]
    ) -> None:
        """Write a step whose update is done: its replies, and then its line."""
        saving, self._saving = self._saving, 0.0
        line = {**logs, **self.writer.write_replies(step, groups)}
        line |= {"time/dollars": spent.get("dollars", 0.0), "time/save": saving}
        self.folder.write_spent(spent)
        self.write_evaluation(step, line)

    def write_evaluation(self, step: int, logs: Mapping[str, float]) -> None:
        """Write a line of metrics: that of a step, or one with only an evaluation of the weights after it."""
        self.folder.append_metrics(self.phase, step, logs)
        self.writer.announce(step, logs)

    def save(self, step: int, save: Callable[[], None]) -> None:
        """Save a checkpoint with the helpers' counters beside it, and remove old ones, which verl would keep."""
        began = time.perf_counter()
        save()
        if self._checkpoint(step).is_dir():
            write_json(self._checkpoint(step) / COUNTERS, self._counters)
        for old in saved_steps(self.folder)[: -self.keep]:
            shutil.rmtree(self._checkpoint(old), ignore_errors=True)
        self._saving += time.perf_counter() - began

    def _checkpoint(self, step: int) -> Path:
        return self.folder.checkpoints.path / f"global_step_{step}"


OWN = "upshot/"
"""Prefix of the metrics that our trainer computes from the replies, as local mode does."""


def rename_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one of verl's steps; values that are not finite are left out."""
    out: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if math.isfinite(number) and not isinstance(value, str):
            ours = name.removeprefix(OWN)
            out[ours if ours != name else METRIC_NAMES.get(name, f"verl/{name}")] = number
        if name == "actor/grad_norm":
            out["train/skipped"] = float(not math.isfinite(number))  # verl's engine skips such an update
    return out


def mark_own(logs: Mapping[str, float]) -> dict[str, float]:
    """Our metrics among verl's."""
    return {f"{OWN}{key}": value for key, value in logs.items()}


class RunEcho:
    """Reads each new line of metrics.jsonl once, and passes it to a reporter."""

    def __init__(self, folder: RunFolder, phase: str, reporter: Reporter) -> None:
        self.phase, self.reporter = phase, reporter
        self._alarms = Alarms(credit_rule(folder.recipe.credit).trains_futures)
        self._log = LogTail(folder.path / METRICS)
        self._read(silent=True)

    def follow(self, log_line: str = "") -> None:
        """Report the steps since the last call; `log_line`: a line of verl's log, reported if it is our watchdog's."""
        if MARK in log_line:
            self.reporter.say(log_line[log_line.index(MARK) :])
        self._read(silent=False)

    def _read(self, silent: bool) -> None:
        for _, _, line in self._log.read():
            if line.get("phase") != self.phase:
                continue
            step = int(line.pop("step"))
            begun = self._alarms.watch(line, step)
            if not silent:
                for text in begun:
                    self.reporter.say(f"step {step}: {text}")
                numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
                self.reporter.step(self.phase, step, numbers)
