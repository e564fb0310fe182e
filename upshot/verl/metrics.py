"""verl's metrics → our names, as they come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upshot.core.files import parse_json_line

OURS = {
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/lr",
    "actor/entropy": "policy/entropy",
    "actor/pg_loss": "loss/policy",
    "actor/pg_clipfrac": "policy/clipped",
    "timing_s/step": "time/step",
    "timing_s/gen": "time/rollout",
    "timing_s/update_actor": "time/learn",
    "timing_s/testing": "time/eval",
    "timing_s/save_checkpoint": "time/save",
    "train/loss": "loss/nll",
    "train/grad_norm": "train/grad_norm",
    "train/lr": "train/lr",
    "val/loss": "eval/loss/nll",
}
"""Those that mean the same here; all others keep their name, under `verl/`."""
OWN = "upshot/"
"""Before those that our trainer works out itself, from the replies, as local mode does."""


def line_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record of verl's file logger; what is no finite number is left out."""
    out: dict[str, float] = {}
    for name, value in record["data"].items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        ours = name.removeprefix(OWN)
        out[ours if ours != name else OURS.get(name, f"verl/{name}")] = value
    return out


class Follower:
    """Reads whole lines of verl's file, each once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def new(self) -> list[dict[str, Any]]:
        """The records since the last call. A line that is still being written waits."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        return [row for line in whole.split(b"\n") if (row := parse_json_line(line)) is not None]

    def forget(self) -> None:
        """Remove the file: verl begins a new one."""
        self.path.unlink(missing_ok=True)
        self._at = 0
