"""Checkpoints of a run: folders that are complete or absent. No torch here: what is in them is their writer's business.

They are written by a thread while training goes on (`Saver` in `writer.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from upshot.config.phases import phase_order
from upshot.core.files import write_folder, write_json
from upshot.training.metrics.best import BestMark

STATE = "state.json"
"""Phase and step; the last file to be written."""
BEST = "best.json"
"""Beside the checkpoints: which of them is the best, and by which metric."""


class Checkpoint(NamedTuple):
    """A saved step."""

    path: Path
    phase: str
    step: int


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, run: Path, read_only: bool = False) -> None:
        self.run = run
        self.read_only = read_only
        """Whether another rank writes them: `save` only says where one will lie."""
        self.path = run / "checkpoints"

    def saved(self) -> list[Checkpoint]:
        """Whole checkpoints, the newest (by phase and step, whatever the clock said) last."""
        states = {file.parent: json.loads(file.read_text()) for file in self.path.glob(f"[!.]*-*/{STATE}")}
        saved = [Checkpoint(folder, state["phase"], state["step"]) for folder, state in states.items()]
        return sorted(saved, key=lambda checkpoint: phase_order(checkpoint.phase, checkpoint.step))

    def save(
        self, phase: str, step: int, keep: int, write: Callable[[Path], None], best: BestMark | None = None
    ) -> Path:
        """The checkpoint of a step, filled by `write`; one that is there already stays. Older ones beyond `keep` go.

        With `best` it is the best one from now on, which stays however old it gets.
        """
        final = self.path / f"{phase}-{step:06d}"
        if self.read_only:
            return final
        if not (final / STATE).is_file():
            self._write(final, phase, step, write)
        if best is not None:
            write_json(self.path / BEST, {"checkpoint": final.name, "metric": best.metric, "value": best.value})
        kept = self.best()
        for old in self.saved()[:-keep]:
            if old.path.name != kept:
                shutil.rmtree(old.path)
        return final

    def best(self) -> str | None:
        """The name of the best checkpoint, where one was kept as such."""
        path = self.path / BEST
        return str(json.loads(path.read_text())["checkpoint"]) if path.is_file() else None

    def _write(self, final: Path, phase: str, step: int, write: Callable[[Path], None]) -> None:
        for torn in self.path.glob(".partial-*"):  # of a run that was killed while it saved
            shutil.rmtree(torn, ignore_errors=True)

        def write_all(folder: Path) -> None:
            write(folder)
            write_json(folder / STATE, {"phase": phase, "step": step})

        way_out = f"earlier checkpoints are intact; free some space and continue with --resume {self.run}"
        write_folder(final, write_all, "checkpoint ", way_out)
