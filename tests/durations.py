"""Which tests are long: read from a recording, never from marks in the code.

    make durations                                     # times every test and writes tests/durations.json
    python -m pytest tests/run --record-durations      # the same for a folder; the records of other files stay

A test that took 0.6 s or more is marked `long` when it is collected, and `make test` leaves it out; a test that is
not recorded runs there. A test's time is its own and that of the fixtures it shares with others: without the others it
would pay for them alone. Counted are CPU seconds of the process and of the processes it started, and the seconds it
slept. CPU seconds are divided by how much slower than a reference machine a small fixed work runs between the tests:
so a slow or busy machine, and one whose host gives its time to others, record nearly the same. What many tests import
is imported before the first of them, which would seem to be long. A file whose long tests are skipped here (no
browser) keeps its record.

The tests of a file run after one another, files with much to do first: see `balance`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.patience import crowded
from tests.support import forked

RECORD = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).parent.parent
monotonic = time.monotonic
"""Taken at the start: a test that moves the clock is measured before its patch is undone."""
LONG_S = 0.6


HEAVY = (
    "transformers.models.llama.modeling_llama", "transformers.generation", "peft", "upshot.run.run", "upshot.verl",
    "upshot.serving.openai.server", "litellm", "openai", "sympy", "pyarrow.parquet", "pandas",
)  # fmt: skip
"""Modules that take long to import and that tests import while they run."""


@dataclass(frozen=True)
class FileRecord:
    """The seconds of a file's tests; shared fixtures count once."""

    short_s: float
    """Seconds of the tests that are not long."""
    all_s: float
    tests: int
    """Number of tests."""


@dataclass(frozen=True)
class Recording:
    """The contents of `durations.json`."""

    long: dict[str, float]
    """Seconds of every test that took `LONG_S` or more."""
    files: dict[str, FileRecord]

    @property
    def short_s(self) -> float:
        """Seconds of all tests that are not long."""
        return sum(file.short_s for file in self.files.values())

    @property
    def all_s(self) -> float:
        """Seconds of all tests."""
        return sum(file.all_s for file in self.files.values())

    def with_files_of(self, newer: Recording) -> Recording:
        """This recording, with the files of a newer one replaced; files that no longer exist are dropped."""
        old = [name for name in self.files.keys() - newer.files.keys() if (ROOT / name).exists()]
        long = {name: spent for name, spent in self.long.items() if name.partition("::")[0] in old} | newer.long
        files = {name: self.files[name] for name in old} | newer.files
        return Recording(dict(sorted(long.items())), dict(sorted(files.items())))


def read_recording() -> Recording:
    """The recording by which tests are marked as long."""
    record = json.loads(RECORD.read_text())
    return Recording(record["long"], {name: FileRecord(*numbers) for name, numbers in record["files"].items()})


def write_recording(recording: Recording) -> None:
    """Write `durations.json`, one line per test or file."""
    files = {name: [file.short_s, file.all_s, file.tests] for name, file in recording.files.items()}
    text = json.dumps({"long": recording.long, "files": files}, indent=1)
    RECORD.write_text(re.sub(r"\[\s+(\S+)\s+(\S+)\s+(\S+)\s+\]", r"[\1 \2 \3]", text) + "\n")


def balance(names: Sequence[str], recording: Recording, long_too: bool) -> list[int]:
    """An order for two processes: each begins with one half and, when done, takes tests from the end of the other's
    half.

    Files with much to do come first in each half, so that only short tests are left to share at the end. A file that is
    not recorded counts with the mean time of a test. The tests of a file stay together, since they share fixtures.
    """
    groups = [list(group) for _, group in groupby(range(len(names)), lambda at: names[at].partition("::")[0])]

    each = (recording.all_s if long_too else recording.short_s) / max(1, sum(f.tests for f in recording.files.values()))

    def seconds(group: Sequence[int]) -> float:
        file = recording.files.get(names[group[0]].partition("::")[0])
        if file is None:  # a new file: count its tests with the mean time of all
            return each * len(group)
        return file.all_s if long_too else file.short_s

    halves: tuple[list[int], list[int]] = ([], [])
    room = (len(names) // 2, len(names) - len(names) // 2)
    spent = [0.0, 0.0]
    for group in sorted(groups, key=seconds, reverse=True):
        half = 0 if spent[0] <= spent[1] else 1
        if len(halves[half]) + len(group) > room[half]:
            half = 1 - half
        halves[half].extend(group)
        spent[half] += seconds(group)
    return [*halves[0], *halves[1]]


class Pace:
    """How many times slower than the reference machine this one runs."""

    REFERENCE_S = 0.0042
    """CPU seconds of `work` on a quiet Xeon of 2.5 GHz."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque([self.REFERENCE_S], maxlen=20)
        self.numbers, self.last = np.arange(20_000, dtype=np.float64), 0.0

    def work(self) -> None:
        """Half of it Python, half NumPy."""
        sum(i * i % 7 for i in range(30_000))
        for _ in range(40):
            (self.numbers * 1.5 + self.numbers).sum()

    def measure(self) -> None:
        """Time the work again, a few times per second."""
        if monotonic() - self.last > 0.2:
            began = time.thread_time()
            self.work()
            self.recent.append(time.thread_time() - began)
            self.last = monotonic()

    @property
    def slower(self) -> float:
        """By the mean over the last seconds, since a host takes time away in bursts."""
        return sum(self.recent) / len(self.recent) / self.REFERENCE_S


PACE = Pace()


class Clock:
    """The seconds that something would take on a quiet reference machine."""

    def __init__(self) -> None:
        self.cpu, self.children, self.wall, self.queued = *_cpu(), monotonic(), _queued()

    def seconds(self) -> float:
        """Seconds since the clock was created."""
        cpu, children = (now - before for now, before in zip(_cpu(), (self.cpu, self.children), strict=True))
        wall = monotonic() - self.wall
        # The system reports a process when it ends; earlier tests waited for what a server did for them.
        children = min(children, wall * (os.cpu_count() or 1))
        # Waiting for a process that is itself waiting for a core is not sleeping.
        busy = cpu + _queued() - self.queued + children * max(1.0, crowded())
        return (cpu + children) / PACE.slower + max(0.0, wall - busy)


def _cpu() -> tuple[float, float]:
    """CPU seconds of this process and of its ended children."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime + forked.cpu_s


def _queued() -> float:
    """How long this process was ready to run but had no core; for several threads, the longest of their waits."""
    waited = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has just ended
            waited = max(waited, int(file.read_text().split()[1]))
    return waited / 1e9


@dataclass(eq=False)  # pluggy keeps plugins in sets
class Recorder:
    """Times tests in the processes that run them; the first process adds everything up and writes the file."""

    shared: dict[str, float] = field(default_factory=dict)
    """Fixture of a module or package → its seconds."""
    uses: dict[str, list[str]] = field(default_factory=dict)
    """Test → such fixtures."""
    own: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Test → seconds without such fixtures."""
    made: dict[str, float] = field(default_factory=dict)
    """Shared fixtures created since the last report of this process."""
    clock: Clock = field(default_factory=Clock)
    skipped: set[str] = field(default_factory=set)
    """Tests that did not run here."""
    heavy: Sequence[str] = HEAVY
    """Modules to import before the first test."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        """Time a fixture that several tests share; the fixtures it depends on were created before."""
        clock = Clock()
        result = yield
        if fixturedef.scope != "function":
            self.made[f"{fixturedef.baseid}::{fixturedef.argname}"] = clock.seconds()
        return result

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Import the modules now; otherwise the first test that needs one would be charged for the import."""
        for name in self.heavy if session.items else ():
            with suppress(ImportError):
                import_module(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[Any]:
        """Start timing a test."""
        PACE.measure()
        self.clock = Clock()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any) -> Iterator[Any]:
        """Send the seconds of a test's set-up, call or teardown along with its report."""
        report = yield
        definitions = item._fixtureinfo.name2fixturedefs.items()
        uses = [f"{made[-1].baseid}::{name}" for name, made in definitions if made[-1].scope != "function"]
        seconds = max(0.0, self.clock.seconds() - sum(self.made.values()))
        report.user_properties = [("durations", [seconds, self.made, uses])]
        self.made, self.clock = {}, Clock()
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take in a report; the first process gets the reports of all."""
        if report.skipped:
            self.skipped.add(report.nodeid)
        for _, (seconds, made, uses) in report.user_properties:
            self.own[report.nodeid] += seconds
            self.shared |= made
            self.uses[report.nodeid] = uses

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the recording in the first process, if the tests ran to the end."""
        if "PYTEST_XDIST_WORKER" not in os.environ and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            old = read_recording() if RECORD.exists() else Recording({}, {})
            kept = {name.partition("::")[0] for name in self.skipped & old.long.keys()}
            own = {name: spent for name, spent in self.own.items() if name.partition("::")[0] not in kept}
            write_recording(old.with_files_of(split(own, self.uses, self.shared)))


def split(own: Mapping[str, float], uses: Mapping[str, Sequence[str]], shared: Mapping[str, float]) -> Recording:
    """Long and short tests, from the seconds of the tests alone and of the fixtures that they share."""
    whole = {name: spent + sum(shared.get(use, 0.0) for use in uses.get(name, ())) for name, spent in own.items()}
    long = {name: round(whole[name], 1) for name in sorted(whole) if whole[name] >= LONG_S}

    def together(names: Sequence[str]) -> float:
        made = {use for name in names for use in uses.get(name, ())}
        return round(sum(own[name] for name in names) + sum(shared.get(use, 0.0) for use in made), 1)

    of_file = defaultdict(list)
    for name in own:
        of_file[name.partition("::")[0]].append(name)
    return Recording(
        long,
        {
            file: FileRecord(together([name for name in names if name not in long]), together(names), len(names))
            for file, names in sorted(of_file.items())
        },
    )
