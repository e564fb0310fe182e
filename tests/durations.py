"""Which tests are long: read from a recording, never from marks in the code.

    make durations                                     # times every test and writes tests/durations.json
    python -m pytest tests/run --record-durations      # the same for a folder; the records of other files stay

A test that took a second or more is marked `long` when it is collected, and `make test` leaves it out; a test that is
not recorded runs there. A test's time is its own and that of the fixtures it shares with others: without the others it
would pay for them alone. Counted are CPU seconds of the process and of the processes it started, and the seconds it
slept, fewer of them where other programs made it wait: so a busy machine records nearly what a quiet one does. What
many tests import is imported before the first of them, which would seem to be long.

The tests of a file run after one another, files with much to do first: see `balance`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.patience import crowded
from tests.support import forked

RECORD = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).parent.parent
monotonic = time.monotonic
"""Kept from the start: a test that sets the clock forward is measured before its patch is taken back."""
LONG_S = 1.0


HEAVY = (
    "transformers.models.llama.modeling_llama", "transformers.generation", "peft", "upshot.run.run", "upshot.verl",
    "upshot.serving.openai.server", "litellm", "openai", "sympy", "pyarrow.parquet", "pandas",
)  # fmt: skip
"""Modules that take long to import and that tests import when they run."""


@dataclass(frozen=True)
class FileRecord:
    """The seconds of a file's tests, shared fixtures counted once."""

    short_s: float
    """Of those that are not long."""
    all_s: float
    tests: int
    """How many there are."""


@dataclass(frozen=True)
class Recording:
    """What `durations.json` holds."""

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
        """This one, with the files of a newer one in place of its own; files that are gone are left out."""
        old = [name for name in self.files.keys() - newer.files.keys() if (ROOT / name).exists()]
        long = {name: spent for name, spent in self.long.items() if name.partition("::")[0] in old} | newer.long
        files = {name: self.files[name] for name in old} | newer.files
        return Recording(dict(sorted(long.items())), dict(sorted(files.items())))


def read_recording() -> Recording:
    """The recording that the split is derived from."""
    record = json.loads(RECORD.read_text())
    return Recording(record["long"], {name: FileRecord(*numbers) for name, numbers in record["files"].items()})


def write_recording(recording: Recording) -> None:
    """Write `durations.json`, one line a test or file."""
    files = {name: [file.short_s, file.all_s, file.tests] for name, file in recording.files.items()}
    text = json.dumps({"long": recording.long, "files": files}, indent=1)
    RECORD.write_text(re.sub(r"\[\s+(\S+)\s+(\S+)\s+(\S+)\s+\]", r"[\1 \2 \3]", text) + "\n")


def balance(names: Sequence[str], recording: Recording, long_too: bool) -> list[int]:
    """An order for two processes, each of which begins with a half and takes tests of the other's end when it is done.

    Files with much to do come first in each half, so what is left to share at the end are short tests. The tests of a
    file stay together, since they share fixtures.
    """
    groups = [list(group) for _, group in groupby(range(len(names)), lambda at: names[at].partition("::")[0])]

    def seconds(group: Sequence[int]) -> float:
        file = recording.files.get(names[group[0]].partition("::")[0])
        return 0.0 if file is None else file.all_s if long_too else file.short_s

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


class Clock:
    """Seconds that something took here, whatever else the machine does."""

    def __init__(self) -> None:
        self.cpu, self.wall, self.queued = _cpu(), monotonic(), _queued()

    def seconds(self) -> float:
        """Since the clock was made."""
        cpu = _cpu() - self.cpu
        slept = monotonic() - self.wall - (_queued() - self.queued) - cpu
        return cpu + max(0.0, slept) / max(1.0, crowded())


def _cpu() -> float:
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses) + forked.cpu_s


def _queued() -> float:
    """How long this process was ready to run and had no core; of its threads, that of the one that waited longest."""
    waited = [file.read_text().split()[1] for file in Path("/proc/self/task").glob("*/schedstat")]
    return max(map(int, waited), default=0) / 1e9


@dataclass(eq=False)  # pluggy keeps plugins in sets
class Recorder:
    """Times tests in the processes that run them; the first process adds it all up and writes the file."""

    shared: dict[str, float] = field(default_factory=dict)
    """Fixture of a module or package → its seconds."""
    uses: dict[str, list[str]] = field(default_factory=dict)
    """Test → such fixtures."""
    own: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Test → seconds without such fixtures."""
    made: dict[str, float] = field(default_factory=dict)
    """Shared fixtures made since the last report of this process."""
    clock: Clock = field(default_factory=Clock)
    heavy: Sequence[str] = HEAVY
    """Modules to import before the first test."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        """Time a fixture that several tests share; those it needs itself were made before."""
        clock = Clock()
        result = yield
        if fixturedef.scope != "function":
            self.made[f"{fixturedef.baseid}::{fixturedef.argname}"] = clock.seconds()
        return result

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Import what the first test that needs it would seem to have taken long for."""
        for name in self.heavy if session.items else ():
            with suppress(ImportError):
                import_module(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[Any]:
        """Begin a test."""
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
        """Take a report in; the first process gets those of all."""
        for _, (seconds, made, uses) in report.user_properties:
            self.own[report.nodeid] += seconds
            self.shared |= made
            self.uses[report.nodeid] = uses

    def pytest_sessionfinish(self) -> None:
        """Write the recording, in the first process."""
        if "PYTEST_XDIST_WORKER" not in os.environ:
            newer = split(self.own, self.uses, self.shared)
            write_recording((read_recording() if RECORD.exists() else newer).with_files_of(newer))


def split(own: Mapping[str, float], uses: Mapping[str, Sequence[str]], shared: Mapping[str, float]) -> Recording:
    """Long and short tests, from the seconds of tests alone and of the fixtures that they share."""
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
