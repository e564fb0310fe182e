"""What lies in a run folder besides its two logs: recipe, versions, status, headline table, sub-runs.

Every file is optional, and one that cannot be read becomes a sentence on the page. The logs themselves are read in
`curves` and `rollouts`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from upshot.run.report.lines import number

LOGS = ("metrics.jsonl", "rollouts.jsonl")
OTHERS = ("recipe.yaml", "versions.json", "status.json", "table.json")
DEPTH = 3
"""How deep sub-runs are looked for."""
MAX_RECIPE = 200_000


@dataclass(slots=True)
class ReportFolder:
    """One run folder, read."""

    path: Path
    name: str
    """Path below the folder that was opened; the opened folder's own name for itself."""
    recipe: str | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    table: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    """What could not be read, in sentences."""


def is_run(path: Path) -> bool:
    """Whether a folder holds anything of a run."""
    return any((path / name).is_file() for name in LOGS + OTHERS)


def find_runs(root: Path) -> list[ReportFolder]:
    """The run folder itself (if it is one), then its sub-runs in the order they were started."""
    found = [read_run(root, root.resolve().name)] if is_run(root) else []
    inner = [read_run(path, path.relative_to(root).as_posix()) for path in _subfolders(root, DEPTH)]
    return found + sorted(inner, key=lambda run: (started(run), run.name))


def _subfolders(root: Path, depth: int) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        hidden = path.name.startswith(".") or path.name == "checkpoints"
        if hidden or path.is_symlink() or not path.is_dir():
            continue
        if is_run(path):
            yield path
        if depth > 1:
            yield from _subfolders(path, depth - 1)


def read_run(path: Path, name: str) -> ReportFolder:
    """The small files of one run folder."""
    run = ReportFolder(path, name)
    recipe = path / "recipe.yaml"
    if recipe.is_file():
        text = recipe.read_text("utf-8", "replace")
        run.recipe = text[:MAX_RECIPE]
        if len(text) > MAX_RECIPE:
            run.notes.append(f"recipe.yaml: {len(text) - MAX_RECIPE:,} characters left out.")
    run.versions = _read_object(run, "versions.json") or {}
    run.status = _read_object(run, "status.json") or {}
    run.table = _read_table(run)
    return run


def _read_object(run: ReportFolder, name: str) -> dict[str, Any] | None:
    path = run.path / name
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text("utf-8", "replace"))
    except ValueError as error:
        run.notes.append(f"{name}: could not be read ({error}).")
        return None
    if not isinstance(value, dict):
        run.notes.append(f"{name}: expected an object, found {type(value).__name__}.")
        return None
    return value


def _read_table(run: ReportFolder) -> dict[str, Any] | None:
    table = _read_object(run, "table.json")
    if table is None:
        return None
    columns, rows = table.get("columns"), table.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        run.notes.append("table.json: expected 'columns' (a list) and 'rows' (a list of lists).")
        return None
    return table


def duration(run: ReportFolder) -> float | None:
    """Seconds the run took, from its status: stated, or the end (or last sign of life) minus the start."""
    for key in ("seconds", "duration", "elapsed"):
        stated = number(run.status.get(key))
        if stated is not None:
            return stated + _since(run) if run.status.get("state") == "running" else stated
    start = moment(run.status.get("started"))
    ends = (moment(run.status.get(key)) for key in ("finished", "ended", "stopped", "updated"))
    end = next((end for end in ends if end is not None), None)
    return end - start if start is not None and end is not None and end >= start else None


def _since(run: ReportFolder) -> float:
    """Seconds from the status of a running run to its last sign of life."""
    told, log = moment(run.status.get("time")), run.path / LOGS[0]
    return max(0.0, log.stat().st_mtime - told) if told is not None and log.is_file() else 0.0


def moment(value: Any) -> float | None:
    """A time in a status file as seconds since the epoch: a number, or an ISO date."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return None
    return number(value)


def started(run: ReportFolder) -> float:
    """When the run began: as its status says, else its oldest file."""
    stated = moment(run.status.get("started"))
    if stated is not None:
        return stated
    times = [(run.path / name).stat().st_mtime for name in LOGS + OTHERS if (run.path / name).is_file()]
    return min(times)
