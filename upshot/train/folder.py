"""The run folder: what a run leaves behind, and what it resumes from. No torch: whoever plays or learns may write it.

recipe.yaml     the resolved recipe          metrics.jsonl    one line a step
versions.json   what it ran with             rollouts.jsonl   one line a reply, with its tree of futures
status.json     state, step, time left       checkpoints/     Hugging Face folders
spent.json      what the helpers have cost   lock             who is writing it
report.html     written at the end and by `upshot view`
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

from upshot import __version__, config, jsonl
from upshot.errors import UserError
from upshot.recipe import Recipe
from upshot.train.checkpoints import Checkpoint, Checkpoints
from upshot.train.lock import locked
from upshot.train.phases import order
from upshot.whole_files import write_json, write_whole

PACKAGES = ("torch", "transformers", "numpy", "tokenizers", "pydantic", "peft")
METRICS, ROLLOUTS, SPENT = "metrics.jsonl", "rollouts.jsonl", "spent.json"


class RunFolder:
    """Reads and writes one run folder. Lines are appended and flushed, so a killed run keeps what it finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path)

    @classmethod
    def create(cls, recipe: Recipe) -> RunFolder:
        """A new folder with the recipe and versions in it."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        path = Path(recipe.run_dir) if recipe.run_dir else Path("runs") / f"{recipe.name}-{stamp}"
        if (path / "recipe.yaml").exists():
            raise UserError(
                f"run folder '{path}' already holds a run; continue it with --resume {path}, or choose another run_dir"
            )
        folder = cls(path)
        try:
            folder.checkpoints.path.mkdir(parents=True, exist_ok=True)
            folder.write_recipe(recipe)
            write_json(path / "versions.json", versions())
        except OSError as error:
            raise UserError(f"cannot write run folder '{path}': {error.strerror}; set run_dir=…") from error
        return folder

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
        return config.load(str(self.path / "recipe.yaml")).recipe

    def write_recipe(self, recipe: Recipe) -> None:
        """The recipe that the run is made by from now on."""
        write_whole(self.path / "recipe.yaml", config.dump(recipe).encode())

    def metrics(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl; numbers that are not finite become null."""
        self._append(METRICS, [{"phase": phase, "step": step, **values}])

    def rollouts(self, replies: Iterable[Mapping[str, Any]]) -> None:
        """Append replies to rollouts.jsonl."""
        self._append(ROLLOUTS, replies)

    def lines(self, phase: str, step: int | None = None) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of a phase, or of one of its steps."""
        rows = [row for row in jsonl.read(self.path / METRICS) if row.get("phase") == phase]
        return [row for row in rows if step is None or row.get("step") == step]

    def status(self, state: str, **more: Any) -> None:
        """Say how the run stands, in which process, since when, and how many seconds it has run in all."""
        path = self.path / "status.json"
        before = (jsonl.parse(path.read_bytes()) if path.is_file() else None) or {}
        now = time.time()
        seconds = before.get("seconds", 0.0)
        if (before.get("state"), before.get("pid")) == (
            "running",
            os.getpid(),
        ):  # else it was killed: nobody knows when
            seconds += now - before.get("time", now)
        started = before.get("started", now)
        times = {"started": started, "time": now, "seconds": seconds}
        write_json(path, {"state": state, "pid": os.getpid(), **times, **more})

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

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        try:
            jsonl.append(self.path / name, rows)
        except OSError as error:
            raise UserError(
                f"cannot write '{self.path / name}': {error.strerror or error}; "
                f"free some space and continue with --resume {self.path}"
            ) from error


def versions() -> dict[str, str]:
    """What the run depends on."""
    found = {"upshot": __version__, "python": sys.version.split()[0], "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
