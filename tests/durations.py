"""Which tests are long: read from a recording, never from marks in the code.

    make durations        # times every test and writes tests/durations.json; on a quiet machine

A test that took a second or more is marked `long` when it is collected, and `make test` leaves it out; a test that is
not recorded runs there. A test's time is its own and that of the fixtures it shares with others: without the others it
would pay for them alone. Counted are CPU seconds of the process and of the children it waited for, and the seconds it
slept, fewer of them where other programs made it wait.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.patience import crowded

RECORD = Path(__file__).with_suffix(".json")
monotonic = time.monotonic
"""Kept from the start: a test that sets the clock forward is measured before its patch is taken back."""
LONG_S = 1.0


@dataclass(frozen=True)
class Recording:
    """What `durations.json` holds."""

    long: dict[str, float]
    """Seconds of every test that took `LONG_S` or more."""
    short_s: float
    """Seconds of all others together, shared fixtures counted once."""
    all_s: float
    """Seconds of all tests together."""
    tests: int
    """How many there were."""


def read_recording() -> Recording:
    """The recording that the split is derived from."""
    return Recording(**json.loads(RECORD.read_text()))


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
    return sum(use.ru_utime + use.ru_stime for use in uses)


def _queued() -> float:
    """How long this process was ready to run and had no core."""
    file = Path("/proc/self/schedstat")
    return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0


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

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        """Time a fixture that several tests share; those it needs itself were made before."""
        clock = Clock()
        result = yield
        if fixturedef.scope != "function":
            self.made[f"{fixturedef.baseid}::{fixturedef.argname}"] = clock.seconds()
        return result

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
            RECORD.write_text(json.dumps(asdict(split(self.own, self.uses, self.shared)), indent=1) + "\n")


def split(own: Mapping[str, float], uses: Mapping[str, Sequence[str]], shared: Mapping[str, float]) -> Recording:
    """Long and short tests, from the seconds of tests alone and of the fixtures that they share."""
    whole = {name: spent + sum(shared.get(use, 0.0) for use in uses.get(name, ())) for name, spent in own.items()}
    long = {name: round(whole[name], 1) for name in sorted(whole) if whole[name] >= LONG_S}
    short = [name for name in own if name not in long]
    made = {use for name in short for use in uses.get(name, ())}
    short_s = sum(own[name] for name in short) + sum(shared.get(use, 0.0) for use in made)
    return Recording(long, round(short_s), round(sum(own.values()) + sum(shared.values())), len(own))
