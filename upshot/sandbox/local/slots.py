"""Slots: how many runs at once, who waits, and the zygotes each slot keeps warm."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

from upshot.sandbox.inside.namespaces import SCRATCH
from upshot.sandbox.local.cgroup import Cgroups, SlotGroup
from upshot.sandbox.local.languages import extra_paths
from upshot.sandbox.local.layers import Layers
from upshot.sandbox.local.zygotes import TIERS, Template, Zygote, ZygoteGone

RETIRE_AFTER = 20_000
"""Runs after which a zygote is replaced, so that nothing can pile up in one."""


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
        self.groups: dict[str, SlotGroup | None] = {}

    async def zygote(self, tier: str) -> Zygote:
        """The live zygote of a tier."""
        if self.pool.closed:
            raise ZygoteGone("the sandbox was closed")
        zygote = self.zygotes.get(tier)
        if zygote is not None and not zygote.closed and zygote.runs < RETIRE_AFTER:
            return zygote
        if zygote is not None:
            zygote.close()
        if tier not in self.groups:
            self.groups[tier] = self.pool.cgroups.slot(f"{self.index}-{tier}")
        self.zygotes[tier] = await self.pool.templates[tier].spawn(self.pool.spec(self.index, tier), self.groups[tier])
        return self.zygotes[tier]

    def close(self) -> None:
        """End the slot's zygotes."""
        for zygote in self.zygotes.values():
            zygote.close()


class SandboxSlots:
    """A fixed number of slots and a bounded queue before them."""

    def __init__(self, count: int, queue: int, layers: Layers, cgroups: Cgroups, workdir: Path) -> None:
        self.layers = layers
        self.cgroups = cgroups
        self.workdir = workdir
        self.queue = queue
        self.templates = {tier: Template(tier) for tier in TIERS}
        self.all = [Slot(index, self) for index in range(count)]
        self.free = list(reversed(self.all))
        self.waiting: deque[asyncio.Future[Slot]] = deque()
        self.closed = False
        self._zygotes = 0
        self.busy_seconds = 0.1
        """A running mean of how long a run holds a slot, for Retry-After."""
        self._extra_paths: tuple[str, ...] | None = None

    def spec(self, index: int, tier: str) -> dict[str, Any]:
        """What a zygote must know to put up its walls."""
        layers = self.layers
        scratch = SCRATCH
        if layers.namespaces is None:
            # A fresh directory for every zygote: the last one may have died on what it could not remove.
            self._zygotes += 1
            path = self.workdir / f"slot-{index}-{tier}-{self._zygotes}"
            path.mkdir(mode=0o700)
            scratch = str(path)
        if tier == "native" and self._extra_paths is None:
            self._extra_paths = extra_paths()
        walls = {
            "namespaces": layers.namespaces,
            "landlock": layers.landlock,
            "seccomp": layers.seccomp,
            "uid": None if layers.uid_base is None else layers.uid_base + index % 1000,
            "scratch": scratch,
        }
        extra = self._extra_paths or () if tier == "native" else ()
        return {"walls": walls, "workbench": str(self.workdir / "root"), "extra_paths": list(extra)}

    async def acquire(self, tier: str) -> Slot:
        """A free slot, one with a warm zygote of the tier if there is one; raises Busy when the queue is full."""
        if self.free:
            for position in range(len(self.free) - 1, -1, -1):
                if tier in self.free[position].zygotes:
                    return self.free.pop(position)
            return self.free.pop()
        if len(self.waiting) >= self.queue:
            raise Busy(len(self.waiting), max(1.0, len(self.waiting) * self.busy_seconds / len(self.all)))
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result(), 0.0)
            elif future in self.waiting:  # one that waits no more must not fill the queue
                self.waiting.remove(future)
            raise

    def release(self, slot: Slot, held_seconds: float) -> None:
        """Give a slot to whoever waits longest, or back."""
        self.busy_seconds += 0.05 * (held_seconds - self.busy_seconds)
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                future.set_result(slot)
                return
        self.free.append(slot)

    def close(self) -> None:
        """End every zygote, template and group; runs under way and waiting become faults."""
        self.closed = True
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                future.set_exception(ZygoteGone("the sandbox was closed"))
        for slot in self.all:
            slot.close()
        for template in self.templates.values():
            template.close()
        self.cgroups.close()
