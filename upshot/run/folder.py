"""The run folder: what a run leaves behind, and what it resumes from. One class reads and writes it; no torch.

recipe.yaml     the resolved recipe          metrics.jsonl    one line a step
versions.json   what it ran with             rollouts.jsonl   one line a reply, with its tree of futures
status.json     state, step, time left       checkpoints/     Hugging Face folders (`checkpoints.py`)
spent.json      what the helpers have cost   lock             who is writing it (`lock.py`)
table.json      a headline table of demos    report.html      written at the end and by `upshot view`
notes.json      a note and tags of people's  (`upshot runs note`, `upshot runs tag`)
verl.log, …     of a run on a cluster: what verl said, both sides of its config (docs/cluster.md)
rollouts.index.sqlite  what a list of the replies shows (`report/replies.py`)
samples/        a file a step: token ids, their text and log-probabilities, of those replies (`samples.py`)

It is also `upshot.runs`: a run as tables, lists of flat mappings that `pandas.DataFrame(run.metrics)` takes.

    run = upshot.runs.read("runs/quickstart-…")
    run.steps[-1]["reward/mean"]              # a line a step; run.evals: a line an evaluation; run.metrics: all lines
    run.best                                  # the best checkpoint, else the newest
    [r for r in run.replies if r["reward"] is None]
    run.futures[0]["verifier"]
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import platform
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import lru_cache, partial
from html import escape
from pathlib import Path
from typing import Any

from upshot.config.load import dump_recipe, load_recipe
from upshot.config.phases import phase_order
from upshot.config.recipe import Recipe
from upshot.core.conversation import Sample
from upshot.core.errors import UserError
from upshot.core.files import (
    append_jsonl,
    expand_home,
    filter_jsonl,
    parse_json_line,
    read_jsonl,
    suggest_neighbour,
    write_atomic,
    write_json,
)
from upshot.core.html import html_table
from upshot.core.threads import thread_count
from upshot.core.version import __version__
from upshot.rollout.reply import Rollout
from upshot.run import samples
from upshot.run.checkpoints import Checkpoint, Checkpoints
from upshot.run.lock import NAME as LOCK
from upshot.run.lock import hold
from upshot.run.report.replies import CATCH_UP_S, INDEX, ReplyIndex
from upshot.run.samples import Pieces
from upshot.training.metrics.best import evaluated_step, is_evaluation

Table = list[dict[str, Any]]
PACKAGES = ("torch", "transformers", "numpy", "tokenizers", "pydantic", "peft", "verl", "ray", "vllm")
RECIPE, VERSIONS, STATUS, SPENT = "recipe.yaml", "versions.json", "status.json", "spent.json"
METRICS, ROLLOUTS, TABLE, REPORT = "metrics.jsonl", "rollouts.jsonl", "table.json", "report.html"
NOTES = "notes.json"
HEADLINES = ("reward/mean", "reward/missing", "metric/", "loss/", "dpo/", "part/")
"""Metrics that a notebook shows of a run."""
LONGEST_PATH = 1024
"""Longer texts of a recipe are prompts and templates."""
SHOWN = (METRICS, ROLLOUTS, RECIPE, VERSIONS, STATUS, TABLE)
"""A folder with any of these holds something of a run that can be looked at."""
VERL = ("verl.txt", "verl.json", "verl.log")
"""Of a run on a cluster: both sides of its config, verl's own words of the command line, what verl said."""
WRITTEN = (RECIPE, VERSIONS, STATUS, REPORT, METRICS, ROLLOUTS, INDEX, SPENT, *VERL)
FOLDERS = ("base", "checkpoints", "reference", "start", "tensorboard", "verl", samples.FOLDER)
"""What a run writes into its folder."""
MODEL = "config.json"
"""A folder with this is a model's; with a run in it, its path would mean the run's checkpoint."""


class RunFolder:
    """One run folder. Lines are appended and flushed, so a killed run keeps what it finished."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self.path = path
        self.read_only = read_only
        """Whether another rank, the first, writes it: what this one would write is left to that."""
        self.checkpoints = Checkpoints(path, read_only)
        self._tables: dict[str, tuple[object, Table]] = {}
        """Tables that were made of a file, each with the file's time and size then."""

    @classmethod
    def create(cls, recipe: Recipe) -> RunFolder:
        """A new folder with the recipe and versions in it; leftovers of a failed start are removed."""
        path = place_of(recipe)
        folder = cls(path)
        folder.check_free()
        try:
            folder.checkpoints.path.mkdir(parents=True, exist_ok=True)
            with folder.lock(lambda _: None):
                folder._clear()
                folder.checkpoints.path.mkdir(exist_ok=True)
                folder.write_recipe(recipe)
                write_json(path / VERSIONS, versions())
        except OSError as error:
            raise UserError(cannot_write(path, error.strerror or str(error))) from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run folder."""
        if not (path / RECIPE).is_file():
            raise UserError(f"'{path}' is not a run folder (it has no {RECIPE}){suggest_neighbour(path)}")
        return cls(path)

    def check_free(self) -> None:
        """Refuse a folder whose run has begun, and one with other files that a run would replace.

        What a failed start left behind may be replaced: it has a lock beside it.
        """
        if self.begun:
            raise UserError(
                f"run folder '{self.path}' already holds a run; continue it with --resume {self.path}, "
                "or choose another run_dir"
            )
        names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set[str]()
        if LOCK not in names and (taken := sorted(names & {*WRITTEN, *FOLDERS, MODEL})):
            raise UserError(f"'{self.path}' has '{taken[0]}', which does not come from a run; choose another run_dir")

    @property
    def begun(self) -> bool:
        """Whether its run has logged a step, or has finished."""
        metrics = self.path / METRICS
        return (metrics.is_file() and metrics.stat().st_size > 0) or self.status.get("state") == "finished"

    def drop_failed_start(self) -> None:
        """Remove the folder again if its run never reached a step and saved nothing."""
        if self.read_only or self.begun or self.latest() is not None:
            return
        self._clear()
        (self.path / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is in it, which stays
            self.path.rmdir()

    def _clear(self) -> None:
        """Remove what a run writes; other files in the folder stay."""
        for name in WRITTEN:
            (self.path / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def lock(self, say: Callable[[str], None]) -> AbstractContextManager[None]:
        """Hold the folder while writing it: a second process is refused."""
        return nullcontext() if self.read_only else hold(self.path, say)

    # What is there.

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe of the run."""
        return load_recipe(str(self.path / RECIPE)).recipe

    @property
    def status(self) -> dict[str, Any]:
        """The run's state: {'state': 'running' | 'finished' | 'stopped', 'seconds': …}; empty before it began."""
        return self.read_object(STATUS)

    @property
    def notes(self) -> dict[str, Any]:
        """What people wrote about the run: {'note': a text, 'tags': […]}."""
        kept = self.read_object(NOTES)
        tags = kept.get("tags")
        return {"note": str(kept.get("note") or ""), "tags": list(map(str, tags)) if isinstance(tags, list) else []}

    def write_notes(self, note: str | None = None, tags: Sequence[str] | None = None) -> None:
        """Replace the note, the tags, or both."""
        old = self.notes
        tags = old["tags"] if tags is None else list(dict.fromkeys(tags))
        new = {"note": old["note"] if note is None else note, "tags": tags}
        self._write(self.path / NOTES, write_json, new)

    @property
    def metrics(self) -> Table:
        """One line per step: phase, step, and every logged number."""
        return self._table("metrics", METRICS, lambda: read_jsonl(self.path / METRICS))

    @property
    def steps(self) -> Table:
        """The lines of metrics.jsonl that are steps, without those that hold only an evaluation."""
        return [line for line in self.metrics if not is_evaluation(line)]

    @property
    def evals(self) -> Table:
        """One line per evaluation: phase, the step whose model was evaluated, and every number without its `eval/`."""
        return [
            {"phase": line["phase"], "step": evaluated_step(line)}
            | {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}
            for line in self.metrics
            if any(name.startswith("eval/") for name in line)
        ]

    @property
    def rollouts(self) -> Table:
        """One reply each, as it was written: messages, futures, reward, credit."""
        return self._table("rollouts", ROLLOUTS, lambda: read_jsonl(self.path / ROLLOUTS))

    @property
    def replies(self) -> Table:
        """One line per reply: step, row, group, text, reward and each metric's mean."""
        return self._table("replies", ROLLOUTS, lambda: [_flat_reply(line) for line in self.rollouts])

    @property
    def futures(self) -> Table:
        """One line per future: the reply that it continues, its last message, its score by each metric."""
        return self._table("futures", ROLLOUTS, lambda: [row for line in self.rollouts for row in _flat_futures(line)])

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint, a Hugging Face folder; None before the first."""
        latest = self.latest()
        return None if latest is None else latest.path

    @property
    def best(self) -> Path | None:
        """The checkpoint that was the best when evaluated, else the newest; None before the first."""
        name = self.checkpoints.best()
        return self.checkpoint if name is None else self.checkpoints.path / name

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint with its phase and step."""
        return next(reversed(self.checkpoints.saved()), None)

    def lines(self, phase: str, step: int | None = None) -> Table:
        """The lines of metrics.jsonl of a phase, or of one of its steps."""
        rows = read_jsonl(self.path / METRICS)  # not the table: a run that trains for weeks need not hold it
        return [row for row in rows if row.get("phase") == phase and step in (None, row.get("step"))]

    def samples(self, step: int) -> dict[str, list[Sample]]:
        """Token ids and log-probabilities of a step's replies, by key; empty if none were kept."""
        path = samples.file_of(self.path, step)
        return samples.unpack(path.read_bytes()) if path.is_file() else {}

    def spent(self) -> dict[str, float]:
        """What the helper models have cost so far, including steps that were lost and played again."""
        return self.read_object(SPENT)

    def read_object(self, name: str) -> dict[str, Any]:
        """The object in one of the folder's JSON files; empty where there is none."""
        path = self.path / name
        return (parse_json_line(path.read_bytes()) if path.is_file() else None) or {}

    @property
    def started(self) -> float:
        """When the run began, in seconds since the epoch: according to its status, else to its oldest file."""
        stated = moment(self.status.get("started"))
        if stated is not None:
            return stated
        return min((path.stat().st_mtime for name in SHOWN if (path := self.path / name).is_file()), default=0.0)

    def _table(self, key: str, file: str, make: Callable[[], Table]) -> Table:
        """What `make` makes of a file; made again only where that has changed, so that `run.metrics[i]` is cheap."""
        stamp = stamp_of(self.path / file)
        if key not in self._tables or self._tables[key][0] != stamp:
            self._tables[key] = stamp, make()
        return self._tables[key][1]

    def _repr_html_(self) -> str:
        """For notebooks: how the run stands, and its numbers at the first and the last step."""
        status, steps = self.status, self.steps
        last = [line for line in steps if line["phase"] == steps[-1]["phase"]]
        names = [name for name in (last[-1] if last else {}) if name.startswith(HEADLINES)]
        rows: list[tuple[Any, ...]] = [(name, last[0].get(name), last[-1].get(name)) for name in names]
        head = f"{self.path}: {status.get('state', 'not begun')}, {len(steps)} steps; best checkpoint: {self.best}"
        return f"<p>{escape(head)}</p>" + (html_table(rows, ("", "first", "last")) if rows else "")

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r}, {self.status.get('state', 'not begun')})"

    # What is written.

    def write_recipe(self, recipe: Recipe) -> None:
        """Replace the recipe with which the run continues."""
        self._write(self.path / RECIPE, write_atomic, dump_recipe(with_whole_paths(recipe)).encode())

    def append_metrics(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl; numbers that are not finite become null."""
        self._write(self.path / METRICS, append_jsonl, [{"phase": phase, "step": step, **values}])

    def append_rollouts(self, replies: Iterable[Mapping[str, Any]]) -> None:
        """Append replies to rollouts.jsonl."""
        self._write(self.path / ROLLOUTS, append_jsonl, replies)

    def write_index(self) -> None:
        """Update the index of rollouts.jsonl, from which the page lists the replies."""
        if not self.read_only and (self.path / ROLLOUTS).is_file():
            index = ReplyIndex(self.path / ROLLOUTS, kept=True)
            with contextlib.suppress(sqlite3.Error):  # readers do without one that cannot be written
                index.follow(CATCH_UP_S)
            index.database.close()

    def write_samples(self, step: int, replies: Sequence[Rollout], pieces: Pieces | None = None) -> None:
        """Write token ids and log-probabilities of a step's replies, and the text of the ids."""
        path = samples.file_of(self.path, step)
        if not self.read_only:
            self._write(path.parent, partial(Path.mkdir, exist_ok=True))
            self._write(path, write_atomic, samples.pack(replies, pieces))

    def write_status(self, state: str, **more: Any) -> None:
        """Write the run's state, its process, its start, and its total running time in seconds."""
        if self.read_only:
            return
        before, now = self.status, time.time()
        seconds = before.get("seconds", 0.0)
        # A status of another process that still says 'running' is of one that was killed at an unknown time.
        if (before.get("state"), before.get("pid")) == ("running", os.getpid()):
            seconds += now - before.get("time", now)
        times = {"started": before.get("started", now), "time": now, "seconds": seconds}
        write_json(self.path / STATUS, {"state": state, "pid": os.getpid(), **times, **more})

    def write_spent(self, spent: Mapping[str, float]) -> None:
        """Record what the helper models have cost."""
        self._write(self.path / SPENT, write_json, spent)

    def rewind(self, phases: list[str], phase: str, step: int) -> None:
        """Drop lines that a killed run wrote after its last checkpoint, so that nothing is counted twice."""
        if self.read_only:
            return

        def earlier(row: Mapping[str, Any]) -> bool:
            where = row.get("phase", phases[-1])  # rollouts name no phase: only the last one plays any
            return where in phases and phase_order(where, row["step"]) <= phase_order(phase, step)

        for name in (METRICS, ROLLOUTS):
            filter_jsonl(self.path / name, earlier)
        (self.path / INDEX).unlink(missing_ok=True)  # its offsets are outdated; readers of the log work without it
        for file in (self.path / samples.FOLDER).glob("*.npz"):
            if not earlier({"step": int(file.stem)}):
                file.unlink()

    def _write(self, path: Path, write: Callable[..., None], *content: Any) -> None:
        """Have a file written, where the folder is written at all; a full disk is a `UserError`."""
        try:
            if not self.read_only:
                write(path, *content)
        except OSError as error:
            raise UserError(
                f"cannot write '{path}': {error.strerror or error}; "
                f"free some space and continue with --resume {self.path}"
            ) from error


def read(path: str | Path) -> RunFolder:
    """The run in a folder."""
    return RunFolder.open(Path(path))


def find(folder: str | Path = "runs") -> list[RunFolder]:
    """The runs in and below a folder, oldest first."""
    return [run for run in find_shown(Path(folder), sys.maxsize) if (run.path / RECIPE).is_file()]


def find_shown(root: Path, depth: int) -> list[RunFolder]:
    """Everything in and below a folder that can be looked at as a run: the folder itself, then the oldest first."""
    inner = [RunFolder(path) for path in _folders(root, depth) if is_shown(path)]
    whole = [RunFolder(root)] if is_shown(root) else []
    return whole + sorted(inner, key=lambda run: (run.started, run.path))


def is_shown(path: Path) -> bool:
    """Whether a folder holds anything of a run."""
    return any((path / name).is_file() for name in SHOWN)


def _folders(root: Path, depth: int) -> Iterator[Path]:
    for path in sorted(root.iterdir()) if depth and root.is_dir() else ():
        if path.is_dir() and not path.is_symlink() and not path.name.startswith(".") and path.name != "checkpoints":
            yield path
            yield from _folders(path, depth - 1)


def stamp_of(path: Path) -> object:
    """What is different after a file was written; None where there is none."""
    stat = path.stat() if path.is_file() else None
    return stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def moment(value: Any) -> float | None:
    """A time in a status file as seconds since the epoch: a number, or an ISO date as others write it."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(value).timestamp()
    return value if isinstance(value, int | float) else None


def place_of(recipe: Recipe) -> Path:
    """The folder that a recipe is run in."""
    return Path(expand_home(recipe.run_dir)) if recipe.run_dir else free_place(recipe.name)


def free_place(name: str) -> Path:
    """A folder of this moment that is not there yet; of several runs in one second the later ones have a number."""
    first = Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(place for place in itertools.chain([first], others) if not place.exists())


def with_whole_paths(recipe: Recipe) -> Recipe:
    """The recipe with the whole path of every file and folder that it names, so that it works from any folder."""

    def whole(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: whole(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [whole(item) for item in value]
        if not isinstance(value, str) or key in ("name", "run_dir") or len(value) > LONGEST_PATH or "\n" in value:
            return value
        kind, place = ("local:", value[6:]) if value.startswith("local:") else ("", value)
        # A word alone is a name, whatever lies in the current folder; what looks like a path and is there, is one.
        is_path = ("/" in place or Path(place).suffix) and Path(place).exists()
        return f"{kind}{Path(place).absolute()}" if is_path else value

    return recipe.model_validate(whole(recipe.model_dump(mode="json")))


def cannot_write(path: Path, why: str) -> str:
    """What is said of a run folder that cannot be made."""
    return f"cannot write run folder '{path}': {why}; set run_dir=…"


def versions() -> dict[str, str]:
    """What the run depends on."""
    versions = {"upshot": __version__, "python": sys.version.split()[0], "platform": platform.platform()}
    versions["threads"] = str(thread_count())
    return versions | _installed()


@lru_cache(maxsize=1)
def _installed() -> dict[str, str]:
    """Their versions; each is read from a file of many lines."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _flat_reply(line: Mapping[str, Any]) -> dict[str, Any]:
    """A reply of rollouts.jsonl as one flat row. What a score lacks is None, and the reason stands beside it."""
    reward = line.get("reward") or {}
    total = reward.get("total") or {}
    spoken = [message.get("content") for message in line.get("messages") or () if message.get("role") == "assistant"]
    return {
        **{key: line.get(key) for key in ("step", "row", "source", "group", "key", "ended")},
        "reply": spoken[-1] if spoken else None,
        "reward": total.get("value"),
        "missing": total.get("missing"),
        **{name: score.get("value") for name, score in (reward.get("means") or {}).items()},
        **{f"group/{name}": value for name, value in (line.get("groups") or {}).items()},
    }


def _flat_futures(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for future in line.get("futures") or ():
        messages = future.get("messages") or ()
        yield {
            "step": line.get("step"),
            "row": line.get("row"),
            "reply": line.get("key"),
            **{key: future.get(key) for key in ("key", "by", "ended", "missing")},
            "turns": len(messages),
            "last": messages[-1]["content"] if messages else None,
            **{name: score.get("value") for name, score in (future.get("scores") or {}).items()},
        }
