"""Where metrics go besides the run folder and the console: TensorBoard, wandb, trackio.

A tracker's package is imported only when a recipe names it. Missing values are left out, never written as zero.
Steps may repeat (warm start and RL each count from 1; a resumed run steps back), so nothing here relies on their order.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from upshot.core.errors import UserError, did_you_mean


class Tracker:
    """Takes the metrics of each step, and hands them to a run of its package."""

    _run: Any

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Record the metrics of one step."""
        self._run.log({**present(metrics), "step": step})

    def finish(self) -> None:
        """Write out what is pending; the last call."""
        self._run.finish()


class TensorBoard(Tracker):
    """Event files in the run folder's `tensorboard/`, by tensorboard's own writer (no torch, no TensorFlow)."""

    def __init__(self, run: Path, recipe: Mapping[str, Any]) -> None:
        self._writer = _package("tensorboard", "tensorboard.summary").Writer(str(run / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Record the metrics of one step."""
        for name, value in present(metrics).items():
            self._writer.add_scalar(name, value, step=step)
        self._writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb(Tracker):
    """A Weights & Biases run named after the folder; `WANDB_MODE`, `WANDB_PROJECT` and the like are wandb's own."""

    def __init__(self, run: Path, recipe: Mapping[str, Any]) -> None:
        wandb = _package("wandb", "wandb")
        project = os.environ.get("WANDB_PROJECT", "upshot")
        where = {"project": project, "name": run.resolve().name, "id": run_id(run), "dir": str(run)}
        try:
            self._run = wandb.init(**where, resume="allow", config=dict(recipe))
        except wandb.errors.Error as error:
            raise UserError(f"tracker 'wandb': {error}; run `wandb login`, or set WANDB_MODE=offline") from error
        # wandb drops steps that are not ascending; as a metric of its own the step may repeat.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")


class Trackio(Tracker):
    """A trackio run named after the folder, kept on this machine unless trackio's own environment says otherwise."""

    def __init__(self, run: Path, recipe: Mapping[str, Any]) -> None:
        trackio = _package("trackio", "trackio")
        project = os.environ.get("TRACKIO_PROJECT", "upshot")
        self._run = trackio.init(project=project, name=run.resolve().name, config=dict(recipe), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Record the metrics of one step."""
        self._run.log(present(metrics), step=step)


StartTracker = Callable[[Path, Mapping[str, Any]], Tracker]
TRACKERS: dict[str, StartTracker] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


def make_trackers(names: list[str], run: Path, recipe: Mapping[str, Any]) -> list[Tracker]:
    """The trackers a recipe names, started; `recipe` is the resolved one, as plain data."""
    check_names(names)
    made: list[Tracker] = []
    with ExitStack() as stack:  # one that cannot be started ends those before it
        for name in dict.fromkeys(names):
            made.append(TRACKERS[name](run, recipe))
            stack.callback(made[-1].finish)
        stack.pop_all()
    return made


def check_names(names: Sequence[str]) -> None:
    """Refuse a tracker that there is not."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"unknown tracker '{name}' in trackers; {did_you_mean(name, TRACKERS)}")


def present(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The metrics that have a finite value."""
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}


def run_id(run: Path) -> str:
    """One id per run folder, so that a resumed run goes on in the same place."""
    return hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]


def _package(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that is missing deeper down is a broken install, and its traceback says where.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise UserError(not_installed(name)) from error


def not_installed(name: str) -> str:
    """What is said of a tracker whose package is not there."""
    return f"tracker '{name}' needs a package that is not installed; run: pip install -e '.[{name}]'"
