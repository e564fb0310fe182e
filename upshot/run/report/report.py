"""Run folders → what the page shows of them, and `report.html`: the page in one file.

It reads what is there: running, finished or killed runs, one or many. The file stays small enough to mail (about 5 MB)
and says what was left out; the page that follows runs while they train is `server.py`, of the same data.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from os.path import commonpath
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.core.files import write_atomic
from upshot.core.version import __version__
from upshot.run import samples
from upshot.run.folder import (
    METRICS,
    NOTES,
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
    stamp_of,
)
from upshot.run.report import curves as curves_of
from upshot.run.report.compare import differences, experiments, result_of, settings_of
from upshot.run.report.lines import number
from upshot.run.report.page import dump, render
from upshot.run.report.replies import ReplyIndex, dicts

ROLLOUT_BYTES = 12_000_000
"""For conversations, all runs together, before they are packed: to about a quarter, in most logs to a tenth."""
MAX_TEXT = 12_000
"""Characters of one text in a page of one file."""
POINTS = 120_000
"""For curves, all runs together."""
FEWEST_POINTS, MOST_POINTS = 30, 600
"""Points of one curve."""
MAX_CURVES = 2_500
MAX_REASONS = 200
REASON = ("what", "reason", "count", "of")
"""Fields of a reason for what is missing."""
MAX_RECIPE = 200_000
DEPTH = 3
"""How deep runs are looked for below the folder that is shown."""


class ShownRun:
    """A run folder on the page. Every file of it is optional; one that cannot be read becomes a sentence."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self.folder = folder
        self.name = name
        """Path below the folder that was opened; the opened folder's own name for itself."""
        self.curves = curves_of.Curves(folder.path / METRICS)
        self.replies = ReplyIndex(folder.path / ROLLOUTS)
        self.notes: list[str] = []
        """What of the small files could not be read, in sentences."""
        self._stamps: tuple[object, ...] = ()
        self._step_samples: tuple[object, dict[str, Any]] = (None, {})
        """Those of the step that was looked at last."""

    def follow(self, seconds: float = math.inf) -> tuple[bool, bool]:
        """Read what is new: whether the curves or the small files are others, and whether there are more replies."""
        stamps = tuple(stamp_of(self.folder.path / name) for name in (STATUS, TABLE, RECIPE, VERSIONS, NOTES))
        small, self._stamps = stamps != self._stamps, stamps
        return self.curves.follow() or small, self.replies.follow(seconds)

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

    def reply(self, at: int) -> dict[str, Any]:
        """A reply as it was logged, with its tokens and its futures': those of each of the policy's turns, if kept."""
        row = self.replies.read(at)
        file = samples.file_of(self.folder.path, int(number(row.get("step")) or 0))
        stamp = (file, stamp_of(file))
        if self._step_samples[0] != stamp:
            self._step_samples = stamp, samples.spell(file) if file.is_file() else {}
        spelt = self._step_samples[1]
        for future in dicts(row.get("futures")):
            if tokens := spelt.get(str(future.get("key"))):
                future["tokens"] = tokens
        return row | {"tokens": spelt.get(str(row.get("key")), [])}

    def pack(self, limit: int, room: int) -> dict[str, Any]:
        """Everything of the run but its replies, as JSON; at most `room` curves, of `limit` points."""
        self.notes = []
        recipe, versions, status = self.read_recipe(), self.read_object(VERSIONS), self.read_object(STATUS)
        seconds, index = self.seconds(status), self.replies
        sentence, reasons = index.log.sentence(), index.missing()
        return {
            "name": self.name,
            "title": title_of(recipe, self.folder.path),
            "said": self.folder.notes,
            "status": status,
            "started": self.folder.started,
            "seconds": seconds if seconds is not None else self.curves.total("time/step"),
            "missing_logged": self.curves.missing_reasons(),
            "versions": versions,
            "recipe": recipe,
            "table": self.read_table(),
            "result": result_of(self.curves),
            "curves": self._pack_curves(limit, room),
            "notes": [*self.notes, *([f"{self.name}/{sentence}"] if sentence else [])],
            "counts": {"replies": len(index), "futures": index.futures(), "steps": index.steps()},
            "scales": index.scales,
            "missing": [dict(zip(REASON, row, strict=True)) for row in reasons[:MAX_REASONS]],
            "more_reasons": [len(reasons[MAX_REASONS:]), sum(count for _, _, count, _ in reasons[MAX_REASONS:])],
        }

    def _pack_curves(self, limit: int, room: int) -> dict[str, Any]:
        log, series = self.curves, self.curves.series
        wanted = [(phase, key, points) for phase, keys in series.items() for key, points in keys.items()]
        longest = max((len(points) for _, _, points in wanted), default=0)
        sentences = [
            log.log.sentence(),
            longest > limit and f"metrics.jsonl: curves of more than {limit} points are thinned (extremes are kept).",
            len(wanted) > room and f"metrics.jsonl: {len(wanted) - room:,} of {len(wanted):,} curves are left out.",
            log.rewritten and f"metrics.jsonl: {log.rewritten:,} values were logged twice (resumed); the later count.",
            log.not_finite and f"metrics.jsonl: {log.not_finite:,} values were NaN or infinite; shown as missing.",
        ]
        self.notes += [f"{self.name}/{sentence}" for sentence in sentences if isinstance(sentence, str)]
        axes = {"time": log.sums("time/step"), "tokens": log.sums("train/tokens")}
        return curves_of.pack(wanted[:room], limit, axes) | {"rows": log.rows, "steps_by_phase": log.last_steps}


class ShownRuns:
    """All runs in and below some folders, found again when there are more."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(root) for root in roots]
        for root in self.roots:
            if not root.is_dir():
                raise UserError(f"no run folder at '{root}'; give the folder that `upshot train` or `demo` printed")
        self.runs: dict[str, ShownRun] = {}
        self.look()
        if not self.runs:
            raise UserError(
                f"'{self.roots[0]}' is not a run folder: it has none of metrics.jsonl, rollouts.jsonl, recipe.yaml, "
                "status.json"
            )

    def look(self) -> None:
        """Find runs that have begun since, and lose those that are gone."""
        runs = {run.path: run for root in self.roots for run in find_shown(root, DEPTH)}
        paths = [path.resolve() for path in runs]
        base = self.roots[0] if len(self.roots) == 1 else Path(commonpath(paths)) if paths else Path()
        names = {self._name(path, base): run for path, run in runs.items()}
        self.runs = {name: self.runs.get(name) or ShownRun(run, name) for name, run in names.items()}

    def _name(self, path: Path, base: Path) -> str:
        if len(self.roots) == 1:
            return path.relative_to(base).as_posix() if path != base else path.resolve().name
        within = path.resolve().relative_to(base)
        return within.as_posix() if within.parts else path.resolve().name

    def pack(self) -> dict[str, Any]:
        """Everything the page shows but the replies, as JSON."""
        total = sum(len(run.curves.names()) for run in self.runs.values())
        limit = max(FEWEST_POINTS, min(MOST_POINTS, POINTS // max(1, total)))
        packed: list[dict[str, Any]] = []
        room = MAX_CURVES
        for run in self.runs.values():
            packed.append(run.pack(limit, room))
            room -= len(packed[-1]["curves"]["curves"])
        settings = [settings_of(run["recipe"]) for run in packed]
        for one, experiment in zip(packed, experiments(settings, list(self.runs)), strict=True):
            one["experiment"] = experiment
        single = len(self.roots) == 1 and (is_shown(self.roots[0]) or len(packed) == 1)
        return {
            "title": packed[0]["title"] if single else title_of_many(packed),
            "own": single,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "upshot": __version__,
            "runs": packed,
            "differences": differences(settings),
        }


def write_report(run: Path | Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of a run folder or of several (to `report.html` in the first, or to `out`); returns its path."""
    roots = [Path(run)] if isinstance(run, str | Path) else [Path(one) for one in run]
    shown = ShownRuns(roots)
    for one in shown.runs.values():
        one.follow()
    data = shown.pack()
    budget = ROLLOUT_BYTES // max(1, sum(len(one.replies) > 0 for one in shown.runs.values()))
    for one, packed in zip(shown.runs.values(), data["runs"], strict=True):
        packed |= _embed_replies(one, budget, packed["notes"])
    target = Path(out) if out is not None else roots[0] / REPORT
    page = render(f"{data['title']} · Upshot", data)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, page.encode())
    except OSError as error:
        raise UserError(f"cannot write the report to '{target}': {error.strerror}; name another with --out") from error
    return target


def _embed_replies(run: ShownRun, budget: int, notes: list[str]) -> dict[str, Any]:
    """The chosen replies of a run: their index, and each step's packed apart: only what is shown is unpacked."""
    index = run.replies
    chosen = index.choose(budget)
    steps = [entry[0] for entry in index.entries(chosen)]
    if len(chosen) < len(index):
        notes.append(
            f"{run.name}/rollouts.jsonl: this file has {len(chosen):,} of {len(index):,} replies, "
            f"from {len(set(steps)):,} of {index.steps():,} steps "
            "(first, last and evenly spaced; within a step the first prompt groups). `upshot view` shows all."
        )
    packed = []
    for step in dict.fromkeys(steps):
        rows = [shorten_texts(run.reply(at)) for at, of in zip(chosen, steps, strict=True) if of == step]
        packed.append(base64.b64encode(zlib.compress(dump(rows).encode(), 9)).decode())
    return {"index": index.chunk(wanted=chosen), "packed": packed}


def shorten_texts(value: Any) -> Any:
    """The same with every text cut that is longer than a page of one file should carry, and a word where."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]}\n… [{len(value) - MAX_TEXT:,} more characters are left out of this file]"
    if isinstance(value, dict):
        return {key: shorten_texts(inner) for key, inner in value.items()}
    return [shorten_texts(inner) for inner in value] if isinstance(value, list) else value


def title_of(recipe: str | None, folder: Path) -> str:
    """The recipe's name, else the folder's."""
    for line in (recipe or "").splitlines():
        if line.startswith("name:"):
            return line.partition(":")[2].partition(" #")[0].strip().strip("'\"") or folder.resolve().name
    return folder.resolve().name


def title_of_many(packed: Sequence[dict[str, Any]]) -> str:
    """How many runs there are, and of which recipes."""
    runs = [run for run in packed if run["curves"]["rows"] or run["counts"]["replies"]] or packed
    titles = list(dict.fromkeys(run["title"] for run in runs))
    more = f" and {len(titles) - 3} more" if len(titles) > 3 else ""
    return f"{len(runs)} run{'s' * (len(runs) != 1)}: {', '.join(titles[:3])}{more}"
