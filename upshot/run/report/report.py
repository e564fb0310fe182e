"""Run folder → `report.html`: one calm page with the curves, the conversations and what is missing.

It reads what is there: a running, finished or killed run, or a folder of runs side by side. It keeps the page small
enough to mail (about 5 MB) and says on the page what was left out. It does not follow a run live; write it again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.core.files import write_atomic
from upshot.core.version import __version__
from upshot.run.folder import (
    METRICS,
    RECIPE,
    REPORT,
    ROLLOUTS,
    STATUS,
    TABLE,
    VERSIONS,
    RunFolder,
    find_shown,
    is_shown,
    moment,
)
from upshot.run.report import curves as curves_of
from upshot.run.report import rollouts as rollouts_of
from upshot.run.report.lines import number
from upshot.run.report.page import render

ROLLOUT_BYTES = 3_200_000
"""For conversations, all runs together."""
POINTS = 120_000
"""For curves, all runs together."""
FEWEST_POINTS, MOST_POINTS = 30, 600
"""Points of one curve."""
MAX_CURVES = 2_500
MAX_REASONS = 200
MAX_RECIPE = 200_000
DEPTH = 3
"""How deep runs are looked for below the folder that is shown."""


@dataclass(slots=True)
class ShownRun:
    """A run folder on the page. Every file of it is optional; one that cannot be read becomes a sentence."""

    folder: RunFolder
    name: str
    """Path below the folder that was opened; the opened folder's own name for itself."""
    notes: list[str] = field(default_factory=list)
    """What could not be read or was left out, in sentences."""

    def read_object(self, name: str) -> dict[str, Any]:
        """The object in one of the folder's JSON files; empty when there is none."""
        path = self.folder.path / name
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text("utf-8", "replace"))
        except ValueError as error:
            self.notes.append(f"{name}: could not be read ({error}).")
            return {}
        if not isinstance(value, dict):
            self.notes.append(f"{name}: expected an object, found {type(value).__name__}.")
            return {}
        return value

    def read_recipe(self) -> str | None:
        """The recipe's text."""
        path = self.folder.path / RECIPE
        if not path.is_file():
            return None
        text = path.read_text("utf-8", "replace")
        if len(text) > MAX_RECIPE:
            self.notes.append(f"{RECIPE}: {len(text) - MAX_RECIPE:,} characters left out.")
        return text[:MAX_RECIPE]

    def read_table(self) -> dict[str, Any] | None:
        """The headline table of a demo or an evaluation."""
        table = self.read_object(TABLE)
        if not table:
            return None
        columns, rows = table.get("columns"), table.get("rows")
        lists = isinstance(columns, list) and isinstance(rows, list) and all(isinstance(row, list) for row in rows)
        if not lists:
            self.notes.append(f"{TABLE}: expected 'columns' (a list) and 'rows' (a list of lists).")
            return None
        return table

    def seconds(self, status: dict[str, Any]) -> float | None:
        """How long the run took: as its status says, one that runs still until its last line; or from start to end."""
        stated, written, log = number(status.get("seconds")), number(status.get("time")), self.folder.path / METRICS
        if stated is None:
            start, end = moment(status.get("started")), moment(status.get("finished"))
            return end - start if start is not None and end is not None and end >= start else None
        runs = status.get("state") == "running" and written is not None and log.is_file()
        return stated + max(0.0, log.stat().st_mtime - (written or 0.0)) if runs else stated


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the report of a run folder (to `report.html` in it, or to `out`) and return its path."""
    run = Path(run)
    if not run.is_dir():
        raise UserError(f"no run folder at '{run}'; give the folder that `upshot train` or `upshot demo` printed")
    data = collect(run)
    target = Path(out) if out is not None else run / REPORT
    page = render(f"{data['title']} · Upshot", data)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, page.encode())
    except OSError as error:
        raise UserError(f"cannot write the report to '{target}': {error.strerror}; name another with --out") from error
    return target


def collect(root: Path) -> dict[str, Any]:
    """Everything the page shows, as JSON."""
    found = find_shown(root, DEPTH)
    if not found:
        raise UserError(
            f"'{root}' is not a run folder: it holds none of metrics.jsonl, rollouts.jsonl, recipe.yaml, status.json"
        )
    names = [run.path.relative_to(root).as_posix() if run.path != root else root.resolve().name for run in found]
    runs = [ShownRun(run, name) for run, name in zip(found, names, strict=True)]
    with_rollouts = [run for run in found if (run.path / ROLLOUTS).is_file()]
    budget = ROLLOUT_BYTES // max(1, len(with_rollouts))
    logs = [curves_of.read_curves(run.path / METRICS) for run in found]
    total = sum(len(log.names()) for log in logs)
    limit = max(FEWEST_POINTS, min(MOST_POINTS, POINTS // max(1, total)))
    texts = rollouts_of.TextTable()
    packed = []
    room = MAX_CURVES
    for run, log in zip(runs, logs, strict=True):
        curves = _curves(run, log, limit, room)
        room -= len(curves["curves"])
        packed.append(_head(run, log) | {"curves": curves} | _rollouts(run, budget, texts) | {"notes": run.notes})
    if texts.cut:
        runs[0].notes.append(f"{texts.cut:,} texts were longer than {rollouts_of.MAX_TEXT:,} characters and are cut.")
    alone = is_shown(root) or len(runs) == 1
    return {
        "title": packed[0]["title"] if alone else root.resolve().name,
        "own": alone,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "upshot": __version__,
        "runs": packed,
        "texts": texts.all,
    }


def title_of(recipe: str | None, folder: Path) -> str:
    """The recipe's name, else the folder's."""
    for line in (recipe or "").splitlines():
        if line.startswith("name:"):
            return line.partition(":")[2].partition(" #")[0].strip().strip("'\"") or folder.resolve().name
    return folder.resolve().name


def _head(run: ShownRun, log: curves_of.Curves) -> dict[str, Any]:
    recipe, versions, status = run.read_recipe(), run.read_object(VERSIONS), run.read_object(STATUS)
    seconds = run.seconds(status)
    return {
        "name": run.name,
        "title": title_of(recipe, run.folder.path),
        "status": status,
        "started": run.folder.started,
        "seconds": seconds if seconds is not None else log.total("time/step"),
        "missing_logged": log.missing_reasons(),
        "versions": versions,
        "recipe": recipe,
        "table": run.read_table(),
    }


def _curves(run: ShownRun, log: curves_of.Curves, limit: int, room: int) -> dict[str, Any]:
    wanted = [(phase, key, log.series[phase][key]) for phase, key in log.names()]
    packed = curves_of.pack(wanted[:room], limit)
    longest = max((len(points) for _, _, points in wanted), default=0)
    said = [
        log.skipped.sentence("metrics.jsonl"),
        longest > limit and f"metrics.jsonl: curves of more than {limit} points are thinned (extremes are kept).",
        len(wanted) > room and f"metrics.jsonl: {len(wanted) - room:,} of {len(wanted):,} curves are left out.",
        log.rewritten and f"metrics.jsonl: {log.rewritten:,} values were logged twice (resumed); the later ones count.",
        log.not_finite and f"metrics.jsonl: {log.not_finite:,} values were NaN or infinite; shown as missing.",
    ]
    run.notes += [f"{run.name}/{sentence}" for sentence in said if isinstance(sentence, str)]
    return packed | {"rows": log.rows, "steps_by_phase": log.last_steps}


def _rollouts(run: ShownRun, budget: int, texts: rollouts_of.TextTable) -> dict[str, Any]:
    path = run.folder.path / ROLLOUTS
    found = rollouts_of.survey(path)
    chosen = rollouts_of.choose(found.steps, budget)
    lines = [line for step in chosen.values() for line in step]
    replies = [rollouts_of.pack(row, texts) for row in rollouts_of.load(path, lines)] if lines else []
    sentence = found.skipped.sentence("rollouts.jsonl")
    if sentence:
        run.notes.append(f"{run.name}/{sentence}")
    if len(lines) < found.replies:
        run.notes.append(
            f"{run.name}/rollouts.jsonl: this page holds {len(lines):,} of {found.replies:,} replies, "
            f"from {len(chosen):,} of {len(found.steps):,} steps "
            "(first, last and evenly spaced; within a step the first prompt groups)."
        )
    reasons = found.missing.most_common()
    return {
        "replies": replies,
        "counts": {"replies": found.replies, "futures": found.futures, "steps": len(found.steps)},
        "missing": [
            {"what": what, "reason": reason, "count": count, "of": found.scored[what]}
            for (what, reason), count in reasons[:MAX_REASONS]
        ],
        "more_reasons": [max(0, len(reasons) - MAX_REASONS), sum(count for _, count in reasons[MAX_REASONS:])],
    }
