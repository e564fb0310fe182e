"""verl's metrics → the lines of our run folder, as they come."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upshot import jsonl

OURS = {
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/lr",
    "actor/entropy": "policy/entropy",
    "actor/pg_loss": "loss/policy",
    "actor/pg_clipfrac": "policy/clipped",
    "timing_s/step": "time/step",
    "timing_s/gen": "time/rollout",
    "timing_s/update_actor": "time/learn",
}
"""Those that mean the same here; all others keep their name, under `verl/`."""
OWN = "upshot/"
"""Before those that our trainer works out itself, from the replies, as local mode does."""


def line_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl from one of verl's file logger; what is no finite number is left out."""
    out: dict[str, Any] = {"phase": "rl", "step": int(record["step"])}
    for name, value in record["data"].items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        ours = name.removeprefix(OWN)
        out[ours if ours != name else OURS.get(name, f"verl/{name}")] = value
    return out


class Follower:
    """Carries whole lines of verl's file over to ours, each once."""

    def __init__(self, theirs: Path, ours: Path) -> None:
        self.theirs = theirs
        self.ours = ours
        self._at = 0

    def follow(self) -> int:
        """Carry what is new; how many lines there were. A line that is still being written waits."""
        if not self.theirs.is_file():
            return 0
        with self.theirs.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        lines = [line_of(json.loads(line)) for line in whole.splitlines() if line.strip()]
        if lines:
            jsonl.append(self.ours, lines)
        return len(lines)
