"""The run folder: what a run leaves behind, and what it resumes from. No torch: whoever plays or learns may write it.

recipe.yaml     the resolved recipe          metrics.jsonl    one line a step
versions.json   what it ran with             rollouts.jsonl   one line a reply, with its tree of futures
status.json     state, step, time left       checkpoints/     Hugging Face folders
spent.json      what the helpers have cost   lock             who is writing it
report.html     written at the end and by `upshot view`
verl.log, …     of a run on a cluster: what verl said, both sides of its config (docs/cluster.md)
samples/        a file a step: token ids and log-probabilities of those replies
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

from upshot.config.load import dump_recipe, load_recipe
from upshot.config.phases import order
from upshot.config.recipe import Recipe
from upshot.core import jsonl
from upshot.core.errors import UserError
from upshot.core.version import __version__
from upshot.core.whole_files import write_json, write_whole
from upshot.rollout.rollout import Rollout
from upshot.run import samples
from upshot.run.checkpoints import Checkpoint, Checkpoints
from upshot.run.lock import NAME as LOCK
from upshot.run.lock import locked

PACKAGES = ("torch", "transformers", "numpy", "tokenizers", "pydantic", "peft", "verl", "ray", "vllm")
METRICS, ROLLOUTS, SPENT = "metrics.jsonl", "rollouts.jsonl", "spent.json"
VERL = ("verl.txt", "verl.json", "verl.log")
"""Of a run on a cluster: both sides of its config, verl's own words of the command line, what verl said."""
WRITTEN = ("recipe.yaml", "versions.json", "status.json", "report.html", METRICS, ROLLOUTS, SPENT, *VERL)
FOLDERS = ("checkpoints", "reference", "start", "tensorboard", "verl", samples.FOLDER)
"""What a run writes into its folder."""


class RunFolder:
    """Reads and writes one run folder. Lines are appended and flushed, so a killed run keeps what it finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path)

    @classmethod
    def create(cls, recipe: Recipe) -> RunFolder:
        """A new folder with the recipe and versions in it; what a failed start left in its place goes."""
        path = place_of(recipe)
        folder = cls(path)
        folder.check_free()
        try:
            folder.checkpoints.path.mkdir(parents=True, exist_ok=True)
            with folder.locked(lambda _: None):
                folder._clear()
                folder.checkpoints.path.mkdir(exist_ok=True)
                folder.write_recipe(recipe)
                write_json(path / "versions.json", versions())
        except OSError as error:
            raise UserError(cannot_write(path, error.strerror or str(error))) from error
        return folder

    def check_free(self) -> None:
        """Refuse a folder that holds a run which has finished a step."""
        if self.begun:
            raise UserError(
                f"run folder '{self.path}' already holds a run; continue it with --resume {self.path}, "
                "or choose another run_dir"
            )

    @property
    def begun(self) -> bool:
        """Whether a run came to a step in it, or to its end."""
        metrics = self.path / METRICS
        return (metrics.is_file() and metrics.stat().st_size > 0) or self._status().get("state") == "finished"

    def drop_failed_start(self) -> None:
        """Take the folder away again when its run never came to a step and saved nothing."""
        if self.begun or self.latest() is not None:
            return
        self._clear()
        (self.path / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is in it, which stays
            self.path.rmdir()

    def _clear(self) -> None:
        """Remove what a run writes; what somebody else put into the folder stays."""
        for name in WRITTEN:
            (self.path / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run folder."""
        if not (path / "recipe.yaml").is_file():
            raise UserError(f"'{path}' is no run folder: it has no recipe.yaml")
        return cls(path)

    def locked(self, say: Callable[[str], None]) -> AbstractContextManager[None]:
        """Hold the folder while writing it: a second process is refused."""
        return locked(self.path, say)

    def recipe(self) -> Recipe:
        """The resolved recipe of the run."""
        return load_recipe(str(self.path / "recipe.yaml")).recipe

    def write_recipe(self, recipe: Recipe) -> None:
        """The recipe that the run is made by from now on."""
        write_whole(self.path / "recipe.yaml", dump_recipe(recipe).encode())

    def metrics(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl; numbers that are not finite become null."""
        self._append(METRICS, [{"phase": phase, "step": step, **values}])

    def rollouts(self, replies: Iterable[Mapping[str, Any]]) -> None:
        """Append replies to rollouts.jsonl."""
        self._append(ROLLOUTS, replies)

    def samples(self, step: int, replies: Sequence[Rollout]) -> None:
        """Write token ids and log-probabilities of a step's replies."""
        path = samples.file_of(self.path, step)
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, samples.pack(replies))
        except OSError as error:
            raise UserError(self._full(path, error)) from error

    def lines(self, phase: str, step: int | None = None) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of a phase, or of one of its steps."""
        rows = [row for row in jsonl.read(self.path / METRICS) if row.get("phase") == phase]
        return [row for row in rows if step is None or row.get("step") == step]

    def status(self, state: str, **more: Any) -> None:
        """Say how the run stands, in which process, since when, and how many seconds it has run in all."""
        before = self._status()
        now = time.time()
        seconds = before.get("seconds", 0.0)
        if (before.get("state"), before.get("pid")) == (
            "running",
            os.getpid(),
        ):  # else it was killed: nobody knows when
            seconds += now - before.get("time", now)
        started = before.get("started", now)
        times = {"started": started, "time": now, "seconds": seconds}
        write_json(self.path / "status.json", {"state": state, "pid": os.getpid(), **times, **more})

    def _status(self) -> dict[str, Any]:
        path = self.path / "status.json"
        return (jsonl.parse(path.read_bytes()) if path.is_file() else None) or {}

    def spent(self) -> dict[str, float]:
        """What the helper models have cost so far, steps that were lost and played again included."""
        path = self.path / SPENT
        return json.loads(path.read_text()) if path.is_file() else {}

    def write_spent(self, spent: Mapping[str, float]) -> None:
        """Remember what the helper models have cost."""
        write_json(self.path / SPENT, spent)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint."""
        saved = self.checkpoints.saved()
        return saved[-1] if saved else None

    def rewind(self, phases: list[str], phase: str, step: int) -> None:
        """Drop lines that a killed run wrote after its last checkpoint, so that nothing is counted twice."""

        def earlier(row: Mapping[str, Any]) -> bool:
            where = row.get("phase", phases[-1])  # rollouts name no phase: only the last one plays any
            return where in phases and order(where, row["step"]) <= order(phase, step)

        for name in (METRICS, ROLLOUTS):
            jsonl.keep(self.path / name, earlier)
        for file in (self.path / samples.FOLDER).glob("*.npz"):
            if not earlier({"step": int(file.stem)}):
                file.unlink()

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        try:
            jsonl.append(self.path / name, rows)
        except OSError as error:
            raise UserError(self._full(self.path / name, error)) from error

    def _full(self, path: Path, error: OSError) -> str:
        return (
            f"cannot write '{path}': {error.strerror or error}; free some space and continue with --resume {self.path}"
        )


def place_of(recipe: Recipe) -> Path:
    """The folder that a recipe is run in."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(recipe.run_dir) if recipe.run_dir else Path("runs") / f"{recipe.name}-{stamp}"


def cannot_write(path: Path, why: str) -> str:
    """What is said of a run folder that cannot be made."""
    return f"cannot write run folder '{path}': {why}; set run_dir=…"


def versions() -> dict[str, str]:
    """What the run depends on."""
    found = {"upshot": __version__, "python": sys.version.split()[0], "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
