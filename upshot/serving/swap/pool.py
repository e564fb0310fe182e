"""Models that share one arena and are loaded and removed as their requests come.

A model is loaded as soon as its region is free. Models in that region leave when they have been idle for a while. A
model with work continues for its turn, then starts nothing new, and leaves when the started work has ended. The model
that has waited longest comes first. So no model waits for ever, and none is interrupted at every request for another.

While a request waits for a model that is not loaded, a task checks once in every turn of the event loop. This is a
tick, in which every working engine has made a step. Times are counted in ticks instead of seconds, so that on the CPU a
run depends only on its seed; if no engine works, ticks pass at once. Loads run in parallel, on a separate stream.

`layout.py` computes the places, `memory.py` has host memory, device memory and copies.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from upshot.core.errors import UserError
from upshot.serving.swap.layout import MemoryLayout, Region, round_up
from upshot.serving.swap.memory import PIECE, Arena, HostCopy, HostWeights

if TYPE_CHECKING:
    from upshot.engine.engine import Engine

GRACE = 32
"""Ticks that a model is idle before it leaves, because more requests for it may follow."""
TURN = 256
"""Ticks for which a model with work may start more of it while others wait for its region."""
PAUSE = 0.0005
"""Seconds between two checks of a load, which a GPU makes by itself."""


class ModelPool:
    """Models in one arena."""

    def __init__(self, layout: MemoryLayout, device: str | torch.device, piece: int = PIECE) -> None:
        self.arena = Arena(layout, torch.device(device))
        self.slots = {region.name: PoolSlot(self, region) for region in layout.regions}
        self.piece = piece
        """Bytes per copy of a load."""
        self.ticks = 0
        on_gpu = self.arena.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.arena.device) if on_gpu else None
        self._minder: asyncio.Task[None] | None = None
        self.swaps = self.moved = 0
        self.swap_s = self.waiting_s = 0.0

    def slot(self, name: str) -> PoolSlot | None:
        """The slot of a model; None if it has none."""
        return self.slots.get(name)

    def rest(self) -> None:
        """Release all memory, captured steps too, until the next request, for another use."""
        for slot in self.slots.values():
            slot.finish_load()
            slot.leave(keep_steps=False)
        if self.arena.there:
            self.arena.release()

    # --- turns

    def wake(self) -> None:
        """Make sure that the task which decides about loads is running."""
        if self._minder is None or self._minder.done() or self._minder.get_loop() is not asyncio.get_running_loop():
            self._minder = asyncio.get_running_loop().create_task(self._mind())

    async def _mind(self) -> None:
        try:
            while any(slot.load is not None or slot.wanted for slot in self.slots.values()):
                self.tick()
                loading = self.stream is not None and any(slot.load for slot in self.slots.values())
                await asyncio.sleep(PAUSE if loading else 0)
        except BaseException as error:
            for slot in self.slots.values():  # without this they would wait for ever
                slot.notify(error if isinstance(error, Exception) else RuntimeError("the pool was closed"))
            raise
        for slot in self.slots.values():
            slot.holds = False
            slot.notify()

    def tick(self) -> None:
        """One check: which loads have ended, which models leave, which loads start, which may start nothing new."""
        self.ticks += 1
        for slot in self.slots.values():
            if slot.load is not None and slot.load.poll():
                slot.arrive()
            if not slot.wanted:
                slot.waits_since = 0 if slot.load is None else slot.waits_since
            elif not slot.waits_since:
                slot.waits_since, slot.waits_from = self.ticks, time.perf_counter()
        self._take_turns(sorted((s for s in self.slots.values() if s.wanted), key=lambda slot: slot.waits_since))

    def _take_turns(self, newcomers: Sequence[PoolSlot]) -> None:
        """Load waiting models if all models in their region may leave; models whose turn is over start nothing new."""
        contended = {rival.name for newcomer in newcomers for rival in newcomer.rivals()}
        for slot in self.slots.values():  # a turn starts when the load has ended
            slot.contended_since = (slot.contended_since or self.ticks) if slot.here and slot.name in contended else 0
        ending: set[str] = set()
        reserved: list[Region] = []
        for newcomer in newcomers:
            if any(newcomer.region.overlaps(region) for region in reserved):
                continue
            rivals = newcomer.rivals()
            if all(rival.may_leave for rival in rivals):
                for rival in rivals:
                    rival.leave()
                newcomer.begin_load()
                reserved.append(newcomer.region)
                continue
            over = {rival.name for rival in rivals if rival.turn_over}
            ending |= over
            # Others may use the region that it waits for, but only if they do not delay its load.
            if over or self.ticks - newcomer.waits_since >= TURN:
                reserved.append(newcomer.region)
        for slot in self.slots.values():
            slot.hold(slot.name in ending)

    # --- what it took

    def take_times(self) -> dict[str, float]:
        """The number, seconds and GiB of loads, and the seconds spent waiting for models, since the last call."""
        numbers = {"swaps": float(self.swaps), "swap_s": self.swap_s, "waiting_s": self.waiting_s}
        numbers["swapped_gib"] = self.moved / 2**30
        self.swaps = self.moved = 0
        self.swap_s = self.waiting_s = 0.0
        return {f"time/pool/{name}": number for name, number in numbers.items()}

    async def aclose(self) -> None:
        """Stop the task."""
        minder, self._minder = self._minder, None
        if minder is not None and not minder.done():
            minder.cancel()
            await asyncio.gather(minder, return_exceptions=True)


class PoolSlot:
    """One model's region in a pool, and its engine's turn: the `SwapSlot` that the engine is given."""

    def __init__(self, pool: ModelPool, region: Region) -> None:
        self.pool, self.region, self.arena, self.name = pool, region, pool.arena, region.name
        self.weights: HostWeights | None = None
        self.engine: Engine | None = None
        self.load: HostCopy | None = None
        """The copy in progress."""
        self.holds = False
        """Whether the engine starts nothing new."""
        self.used = 0
        """The tick of its last step."""
        self.waits_since = self.contended_since = 0
        """The ticks since which its requests wait for it, and others wait for its region; 0: nobody waits."""
        self.waits_from = 0.0
        """The same moment by the clock."""
        self._arrivals: list[asyncio.Future[None]] = []
        """Futures of everything that waits for it to be loaded."""

    @property
    def here(self) -> bool:
        """Whether weights and pages are in memory."""
        return self.name in self.arena.held and self.load is None

    @property
    def wanted(self) -> bool:
        """Whether requests wait for it, and it is neither loaded nor being loaded."""
        return self.engine is not None and bool(self.engine.scheduler.waiting) and self.name not in self.arena.held

    @property
    def turn_over(self) -> bool:
        """Whether others have waited for a whole turn."""
        return self.contended_since > 0 and self.pool.ticks - self.contended_since >= TURN

    @property
    def may_leave(self) -> bool:
        """Whether it can leave now: it has been idle for a while, or the work started in its turn has ended."""
        scheduler = self.engine.scheduler if self.engine is not None else None
        if not self.here or (scheduler is not None and scheduler.under_way):
            return False
        idle = scheduler is None or not scheduler.waiting
        return self.turn_over or (idle and self.pool.ticks - self.used >= GRACE)

    def rivals(self) -> list[PoolSlot]:
        """The models that are loaded, or being loaded, in its region."""
        held = [self.pool.slots[name] for name in self.arena.held]
        return [other for other in held if other is not self and other.region.overlaps(self.region)]

    # --- a model moves in and out

    def furnish(self, module: torch.nn.Module) -> None:
        """Take over the module's weights and load them, so that an engine can use the module."""
        self.weights = HostWeights(module, self.arena.device)
        if self.kv_bytes <= 0:
            raise UserError(
                f"the weights of '{self.name}' take {self.weights.size / 2**20:.1f} MiB, but the memory plan "
                f"reserves {self.region.size / 2**20:.1f} MiB for them and their keys and values; raise model.memory_gb"
            )
        self.weights.bind(self.arena.bytes_of(self.region))
        self.enter()

    def vacate(self) -> None:
        """Remove the model for good."""
        if self.load is not None:
            self.load.wait()
        self.load = self.engine = self.weights = None
        self.arena.free(self.region)
        self.notify()

    @property
    def kv_bytes(self) -> int:
        """Bytes after the weights."""
        assert self.weights is not None, "furnish() comes first"
        return self.region.size - round_up(self.weights.size)

    def pages(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The memory of all pages, always at the same addresses, because captured steps write there."""
        count = math.prod(size) * dtype.itemsize
        if count > self.kv_bytes:
            raise RuntimeError(f"'{self.name}' needs {count} bytes of pages, but {self.kv_bytes} are reserved")
        start = self.region.size - self.kv_bytes
        return self.arena.bytes_of(self.region)[start : start + count].view(dtype).view(size)

    def begin_load(self) -> None:
        """Start loading; the region is free."""
        assert self.weights is not None, "furnish() comes first"
        self.arena.take()
        stream = self.pool.stream
        if stream is not None:
            # Other engines' work there is done, but the zeros that an engine starts with may not be written yet.
            for other in self.pool.slots.values():
                if other.engine is not None and other.region.overlaps(self.region):
                    stream.wait_stream(other.engine.stream or torch.cuda.default_stream(self.arena.device))
        self.arena.claim(self.region)
        target = self.arena.bytes_of(self.region)[: self.weights.size]
        self.load = HostCopy(self.weights.flat, target, stream, self.pool.piece)

    def finish_load(self) -> None:
        """Wait for a load in progress."""
        if self.load is not None:
            self.load.wait()
            self.arrive()

    def arrive(self) -> None:
        """The weights are loaded: let the engine continue."""
        assert self.load is not None
        self.pool.swaps += 1
        self.pool.swap_s += self.load.seconds
        self.pool.moved += self.load.source.numel()
        if self.waits_since:
            self.pool.waiting_s += time.perf_counter() - self.waits_from
        self.load, self.used, self.waits_since = None, self.pool.ticks, 0
        if self.engine is not None:
            self.engine.resume()
        self.notify()

    def leave(self, keep_steps: bool = True) -> None:
        """Release the region; requests in progress return to the queue."""
        if self.engine is not None:
            self.engine.park(keep_steps)
        self.holds = False
        self.arena.free(self.region)

    # --- turns

    def enter(self) -> None:
        """Load it now, whichever models have to leave."""
        if self.load is None and not self.here:
            for rival in self.rivals():
                rival.finish_load()
                rival.leave()
            self.begin_load()
        self.finish_load()

    async def turn(self) -> bool:
        """Wait until it is loaded and has work; False: there is no more work."""
        assert self.engine is not None, "the engine is made before it is asked"
        scheduler = self.engine.scheduler
        while scheduler.busy:
            if self.here and not (self.holds and not scheduler.under_way):
                self.used = self.pool.ticks
                return True
            self.pool.wake()
            arrival = asyncio.get_running_loop().create_future()
            self._arrivals.append(arrival)
            await arrival
        return False

    def notify(self, error: BaseException | None = None) -> None:
        """Wake everything that waits for it, or make it fail with the error."""
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            if not arrival.done():
                arrival.set_result(None) if error is None else arrival.set_exception(error)

    def hold(self, holds: bool) -> None:
        """Set whether the engine starts nothing new."""
        freed, self.holds = self.holds and not holds, holds
        if freed:
            self.notify()
