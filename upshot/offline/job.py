"""One job for the batch verbs: bounded work, saved piece by piece, within a budget, and resumable.

`run_all` bounds the work in progress. A `Journal` is a file of finished work that survives kill -9. A `Job` combines
the two: the same command continues after the saved work and retries what failed, spending of earlier runs counts, and
a run in which too much fails stops. Each verb defines its pieces of work and how results are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import hashlib
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from upshot.core.errors import UserError, user_error_in
from upshot.core.files import dump_json_line, filter_jsonl, fsync_all, read_jsonl, repair_jsonl
from upshot.core.time_limit import call_seconds
from upshot.models.client.budget import Budget
from upshot.run.console import duration

T = TypeVar("T")
R = TypeVar("R")

RECENT = 20
"""How many of the latest pieces of work are checked for an outage."""
MINUTE = 60.0
TOO_MANY = 0.5
"""If more than this share of them failed, the run stops."""


async def run_all(pieces: Sequence[T], work: Callable[[T], Awaitable[R]], at_once: int) -> list[R]:
    """The results of all pieces in order, with at most `at_once` in progress; one failure ends all.

    Workers take the next piece when they are free, so a file of a million rows does not become a million tasks.
    """
    todo = iter(enumerate(pieces))
    results: dict[int, R] = {}

    async def take() -> None:
        for index, piece in todo:
            results[index] = await work(piece)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(at_once, len(pieces))):
                workers.create_task(take())
    except BaseExceptionGroup as group:
        known = user_error_in(group)  # of a group of failures, the one line that the user must read
        raise (known or group) from group
    return [results[index] for index in range(len(pieces))]


Wanted = Callable[[Mapping[str, Any]], bool]
"""Whether a line stays in a journal."""


class Journal(AbstractContextManager["Journal"]):
    """An append-only file of JSON lines, each of which is finished work.

    A line is on the disk (fsync) before `append` returns. If a crash leaves a half-written last line, it is cut off
    when the journal is opened again.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None, keep: Wanted | None = None) -> None:
        """Open or begin a journal, without the lines that `keep` refuses.

        The settings, if given, are its first line: a journal begun with others is a `UserError`, and so is one that
        another process holds. Without settings, the process that holds the job's log may write.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep is not None:
            filter_jsonl(path, keep)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if settings is not None:
                self._lock()
            repair_jsonl(path)
            self.lines = read_jsonl(path) if settings is None else self._begin(settings)
            """The lines in the journal when it was opened, without the settings."""
        except BaseException:
            self.close()
            raise

    def lines_of(self, *keys: str) -> list[dict[str, Any]]:
        """The lines with the first key; `UserError` if one lacks another key because an earlier version wrote it."""
        lines = [line for line in self.lines if keys[0] in line]
        for line in lines:
            if absent := next((key for key in keys if key not in line), None):
                raise UserError(
                    f"'{self.path}' was started by an earlier version of Upshot ('{line[keys[0]]}' has no '{absent}') "
                    "and cannot be continued; choose another --out"
                )
        return lines

    def append(self, *lines: Mapping[str, Any]) -> None:
        """Add lines; when this returns they are on the disk."""
        data = b"".join(map(dump_json_line, lines))
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file and release its lock."""
        os.close(self._file)

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lock(self) -> None:
        """One process at a time, so that two resumed runs cannot interleave."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is writing {self.path}; wait for it, or use another --out") from error

    def _begin(self, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The lines after the settings, which must be equal to `wanted`."""
        lines = read_jsonl(self.path)
        wanted = json.loads(dump_json_line({"settings": dict(settings)}))
        if not lines or (len(lines) == 1 and lines[0] != wanted):  # no work was done with the other settings
            os.ftruncate(self._file, 0)
            self.append(wanted)
            fsync_all(self.path.parent)
            return []
        if lines[0] != wanted:
            old, new = lines[0].get("settings", {}), wanted["settings"]
            keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
            changed = ", ".join(f"{key}: {old.get(key)!r}, now {new.get(key)!r}" for key in keys[:3])
            raise UserError(f"{self.path} was started with other settings ({changed}); give the same, or another --out")
        return lines[1:]


class Job:
    """Pieces of work, each written to a journal as soon as it is done, within a budget that continues across runs."""

    def __init__(self, what: str, args: argparse.Namespace, log: Journal, results: Journal | None = None) -> None:
        """A job with the options at_once, max_calls, max_dollars, call_seconds and quiet.

        what: the name of the pieces, in the plural. log: the file with the settings. results: the file for finished
        pieces; None: the log itself.
        """
        self.what, self.args, self.log, self.results = what, args, log, results or log
        self.budget = Budget(max_calls=args.max_calls, max_dollars=args.max_dollars)
        spent = [line["spent"] for line in (*log.lines, *self.results.lines) if "spent" in line]
        if spent:
            self.budget.restore(max(spent, key=lambda state: state["calls"]))
        self._written = self.budget.state()
        self._empty = not log.lines and self.results is not log
        self._latest: deque[str | None] = deque(maxlen=RECENT)
        self._advance: Callable[[], None] = lambda: None

    async def run(
        self, pieces: Sequence[T], work: Callable[[T], Awaitable[None]], done: int = 0, shown: str = ""
    ) -> None:
        """Do the work of all pieces, each of which calls `write`; `done` of them were finished by earlier runs.

        shown: what the bar counts, if a piece writes several times.
        """
        call_seconds.set(self.args.call_seconds)
        quiet = self.args.quiet or getattr(self.args, "json", False)
        try:
            with progress(shown or self.what, done + len(pieces), done, quiet, self.args.at_once) as self._advance:
                await run_all(pieces, work, self.args.at_once)
        finally:
            if self.budget.state() != self._written:  # pieces in progress have cost something, too
                self.log.append({"spent": self.budget.state()})

    def write(self, *lines: dict[str, Any], failure: str | None = None, whole: bool = True) -> None:
        """Write results to the disk, with the spending so far; `UserError` if too many of the latest pieces failed.

        failure: why the piece failed; None: it did not. whole: whether the piece is finished.
        """
        if self._empty:  # from the first result on, the log's settings are fixed
            self.log.append({"spent": self._written})
            self._empty = False
        self._written = self.budget.state()
        lines[-1]["spent"] = self._written
        self.results.append(*lines)
        if whole:
            self._advance()
        self._latest.append(failure)
        reasons = Counter(reason for reason in self._latest if reason is not None)
        failed = reasons.total()
        if len(self._latest) == RECENT and failed > RECENT * TOO_MANY:  # an endpoint is down: do not fail the rest
            raise UserError(
                f"{failed} of the last {RECENT} {self.what} failed, mostly: {reasons.most_common(1)[0][0]}; what is "
                f"finished is saved: fix the cause and run the same command again, which retries the failed ones"
            )


def name_row(name: object, row: Mapping[str, Any]) -> str:
    """The key that identifies a row of a file in later runs: its name or its place, and its content."""
    return f"{name} {hashlib.blake2b(dump_json_line(row), digest_size=12).hexdigest()}"


def open_log(out: Path, settings: Mapping[str, Any]) -> Journal:
    """The log beside a file of results; a file without a log was not written by us and is not touched."""
    log = out.with_name(f"{out.name}.log")
    if out.is_file() and out.stat().st_size and not log.is_file():
        raise UserError(f"'{out}' exists without '{log}', the log of its settings; choose another --out")
    return Journal(log, settings)


def _tell_pace(what: str, total: int, before: int, at_once: int) -> Callable[[], None]:
    """Prints the progress: after the first piece, after as many as run concurrently, then once a minute.

    Only from the second time on it estimates the time left: among pieces that start together, the first one to end
    does not show how many end per minute.
    """
    began = last = time.monotonic()
    done = before

    def advance() -> None:
        nonlocal done, last
        done += 1
        now, ended = time.monotonic(), done - before
        if (ended not in (1, at_once) and now - last < MINUTE) or done >= total:
            return
        last = now
        rest = f", about {duration((now - began) / ended * (total - done))} left" if ended >= at_once else ""
        print(f"{what}: {done} of {total}{rest}", file=sys.stderr, flush=True)

    return advance


@contextmanager
def progress(what: str, total: int, done: int, quiet: bool, at_once: int = 1) -> Iterator[Callable[[], None]]:
    """A bar on stderr, or single lines without a terminal; call the yielded function after every finished piece."""
    if quiet:
        yield lambda: None
        return
    if not sys.stderr.isatty():
        yield _tell_pace(what, total, done, at_once)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda: bar.advance(task)
