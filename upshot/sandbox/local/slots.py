"""Slots: the number of concurrent runs, the queue, the warm zygotes of each slot, and counts of their work."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upshot.core.http_server import metrics_page
from upshot.sandbox.inside.namespaces import SCRATCH
from upshot.sandbox.local.cgroup import Cgroups
from upshot.sandbox.local.languages import extra_paths
from upshot.sandbox.local.layers import Layers
from upshot.sandbox.local.zygotes import TIERS, Template, Zygote, ZygoteGone
from upshot.sandbox.outcome import Outcome, TestResult

RETIRE_AFTER = 20_000
"""A zygote is replaced after this many runs, so that nothing can accumulate in it."""


class Busy(Exception):
    """The queue is full; try again after `retry_after` seconds."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"the sandbox is full ({waiting} ahead); try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class Slot:
    """One place to run: a zygote per tier, started when first needed."""

    def __init__(self, index: int, pool: SandboxSlots) -> None:
        self.index = index
        self.pool = pool
        self.zygotes: dict[str, Zygote] = {}

    async def zygote(self, tier: str) -> Zygote:
        """The live zygote of a tier."""
        if self.pool.closed:
            raise ZygoteGone("the sandbox was closed")
        zygote = self.zygotes.get(tier)
        if zygote is not None and not zygote.closed and zygote.runs < RETIRE_AFTER:
            return zygote
        if zygote is not None:
            zygote.close()
        # A group outlives its zygotes, and remembers which kills it has reported.
        group = zygote.group if zygote is not None else self.pool.cgroups.slot(f"{self.index}-{tier}")
        self.zygotes[tier] = await self.pool.templates[tier].spawn(self.pool.spec(self.index, tier), group)
        return self.zygotes[tier]


class SandboxSlots:
    """A fixed number of slots with a bounded queue."""

    def __init__(self, count: int, queue: int, layers: Layers, cgroups: Cgroups, workdir: Path) -> None:
        self.layers = layers
        self.cgroups = cgroups
        self.workdir = workdir
        self.queue = queue
        self.templates = {tier: Template(tier) for tier in TIERS}
        self.all = [Slot(index, self) for index in range(count)]
        self.free = list(reversed(self.all))
        self.waiting = 0
        self.closed = False
        self._gate = asyncio.Semaphore(count)
        self._zygotes = 0
        self.busy_seconds = 0.1
        """A running mean of how long a run holds a slot, for Retry-After."""

    def spec(self, index: int, tier: str) -> dict[str, Any]:
        """The settings with which a zygote puts up its walls."""
        layers = self.layers
        scratch = SCRATCH
        if layers.namespaces is None:
            # A fresh directory for every zygote: the last one may have died because of files that it could not remove.
            self._zygotes += 1
            path = self.workdir / f"slot-{index}-{tier}-{self._zygotes}"
            path.mkdir(mode=0o700)
            scratch = str(path)
        walls = {
            "namespaces": layers.namespaces,
            "landlock": layers.landlock,
            "seccomp": layers.seccomp,
            "uid": None if layers.uid_base is None else layers.uid_base + index % 1000,
            "scratch": scratch,
        }
        extra = extra_paths() if tier == "native" else ()
        return {"walls": walls, "workbench": str(self.workdir / "root"), "extra_paths": extra}

    async def acquire(self, tier: str) -> Slot:
        """A free slot, preferably with a warm zygote of the tier; raises Busy if the queue is full."""
        if self._gate.locked() and self.waiting >= self.queue:
            raise Busy(self.waiting, max(1.0, self.waiting * self.busy_seconds / len(self.all)))
        self.waiting += 1
        try:
            await self._gate.acquire()
        finally:
            self.waiting -= 1
        if self.closed:
            raise ZygoteGone("the sandbox was closed")
        slot = next((slot for slot in reversed(self.free) if tier in slot.zygotes), self.free[-1])
        self.free.remove(slot)
        return slot

    def release(self, slot: Slot, held_seconds: float) -> None:
        """Release a slot to the task that has waited longest."""
        self.busy_seconds += 0.05 * (held_seconds - self.busy_seconds)
        self.free.append(slot)
        self._gate.release()

    def close(self) -> None:
        """End every zygote, template and group; runs under way and waiting become faults."""
        self.closed = True
        for _ in range(self.waiting):
            self._gate.release()
        for zygote in [zygote for slot in self.all for zygote in slot.zygotes.values()]:
            zygote.close()
        for template in self.templates.values():
            template.close()
        self.cgroups.close()


@dataclass
class SandboxMetrics:
    """What the sandbox has done since it started."""

    started: float = field(default_factory=time.time)
    tests: Counter[Outcome] = field(default_factory=Counter)
    runs: Counter[Outcome] = field(default_factory=Counter)
    """Of scripts, those of stdin/stdout tests included."""
    programs: int = 0
    """Programs that were tested."""
    faults: int = 0
    rejected: int = 0
    busy_seconds: float = 0.0

    def count_tests(self, results: Iterable[TestResult]) -> None:
        """Count one program's test results."""
        self.programs += 1
        self.tests.update(result.outcome for result in results)

    def page(self, running: int, waiting: int, slots: int) -> str:
        """In Prometheus' text format."""
        tests, runs = ({outcome: counts[outcome] for outcome in Outcome} for counts in (self.tests, self.runs))
        counters = {"programs": self.programs, "tests": tests, "runs": runs, "faults": self.faults}
        counters |= {"rejected": self.rejected, "busy_seconds": self.busy_seconds}
        uptime = time.time() - self.started
        gauges = {"running": running, "waiting": waiting, "slots": slots, "uptime_seconds": uptime}
        return metrics_page("upshot_sandbox", counters, gauges)
