"""One model's place in a pool: its weights on the host, whether they are in the arena, and its engine's turn."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

import torch

from upshot.core.errors import UserError
from upshot.serving.swap.arena import Arena, HostCopy
from upshot.serving.swap.host import HostWeights
from upshot.serving.swap.order import PoolMember
from upshot.serving.swap.overlay import Region, aligned

if TYPE_CHECKING:
    from upshot.engine.engine import Engine
    from upshot.serving.swap.pool import ModelPool


class PoolSlot:
    """What an engine in a pool is given (engine/swap_slot.py)."""

    def __init__(self, pool: ModelPool, place: Region) -> None:
        self.pool, self.place = pool, place
        self.weights: HostWeights | None = None
        self.engine: Engine | None = None
        self.load: HostCopy | None = None
        """The copy under way."""
        self.holds = False
        self.age = self.stay = self.idle = 0
        self._arrivals: list[asyncio.Future[None]] = []
        """Of those who wait for it to come."""
        self._since: float | None = None
        """When requests began to wait for it."""

    @property
    def name(self) -> str:
        """Of the model."""
        return self.place.name

    @property
    def arena(self) -> Arena:
        """The memory that its place is in."""
        return self.pool.arena

    @property
    def here(self) -> bool:
        """Whether weights and pages are in memory."""
        return self.name in self.arena.held and self.load is None

    # --- a model moves in and out

    def furnish(self, module: torch.nn.Module) -> None:
        """Take the module's weights over, and be here: an engine can be made of it now."""
        self.weights = HostWeights(module, self.arena.device)
        if self.kv_bytes <= 0:
            raise UserError(
                f"the weights of '{self.name}' have {self.weights.size / 2**20:.1f} MiB, the memory plan has "
                f"{self.place.size / 2**20:.1f} MiB for them and their keys and values; raise model.memory_gb"
            )
        self.weights.bind(self.arena.bytes_of(self.place))
        self.enter()

    def vacate(self) -> None:
        """The model is gone for good."""
        if self.load is not None:
            self.load.wait()
        self.load = self.engine = self.weights = None
        self.arena.free(self.place)
        self.tell()

    @property
    def kv_bytes(self) -> int:
        """Bytes behind the weights."""
        assert self.weights is not None, "furnish() comes first"
        return self.place.size - aligned(self.weights.size)

    def pages(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The memory of all pages; see `engine.swap_slot.SwapSlot`."""
        count = math.prod(size) * dtype.itemsize
        if count > self.kv_bytes:
            raise RuntimeError(f"'{self.name}' wants {count} bytes of pages, its place has {self.kv_bytes}")
        start = self.place.size - self.kv_bytes
        return self.arena.bytes_of(self.place)[start : start + count].view(dtype).view(size)

    # --- turns

    def enter(self) -> None:
        """Be here now, whoever has to leave."""
        self.pool.bring(self)

    async def turn(self) -> bool:
        """Wait to be here and to have something to do; False: there is nothing to do any more."""
        engine = self._engine
        while engine.scheduler.busy:
            if self.here and not (self.holds and not engine.scheduler.under_way):
                return True
            self.pool.wake()
            arrival = asyncio.get_running_loop().create_future()
            self._arrivals.append(arrival)
            await arrival
        return False

    def tell(self, error: BaseException | None = None) -> None:
        """Whoever waits for it looks again, or fails."""
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            if arrival.done():
                continue
            if error is None:
                arrival.set_result(None)
            else:
                arrival.set_exception(error)

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None, "the engine is made before it is asked"
        return self.engine

    def seen(self) -> PoolMember:
        """How it stands."""
        scheduler = self.engine.scheduler if self.engine is not None else None
        waiting, running = (len(scheduler.waiting), scheduler.under_way) if scheduler is not None else (0, 0)
        there = self.name in self.arena.held
        return PoolMember(self.place, waiting, running, there, self.load is None, self.age, self.stay, self.idle)

    def come(self, stream: Any) -> None:
        """Begin to load; the place is free."""
        assert self.weights is not None, "furnish() comes first"
        self.arena.claim(self.place)
        target = self.arena.bytes_of(self.place)[: self.weights.size]
        self.load = HostCopy(self.weights.flat, target, stream, self.pool.piece)
        self.stay = self.idle = 0

    def arrive(self) -> None:
        """The weights are there: the engine goes on."""
        assert self.load is not None
        self.pool.count(self.load.seconds, self.load.source.numel(), self._waited())
        self.load = None
        self.age = 0
        if self.engine is not None:
            self.engine.resume()
        self.tell()

    def leave(self, keep_steps: bool = True) -> None:
        """Give the place back; what has begun goes back into the queue."""
        if self.engine is not None:
            self.engine.park(keep_steps)
        self.holds = False
        self.arena.free(self.place)

    def hold(self, holds: bool) -> None:
        """Begin nothing new, or begin again."""
        freed, self.holds = self.holds and not holds, holds
        if freed:
            self.tell()

    def _waited(self) -> float:
        since, self._since = self._since, None
        return 0.0 if since is None else time.perf_counter() - since

    def tick(self, contended: bool) -> None:
        """Count one more tick."""
        member = self.seen()
        self.age = self.age + 1 if member.wanted else 0
        if member.wanted and self._since is None:
            self._since = time.perf_counter()
        if self.load is None:
            self.stay = self.stay + 1 if contended else 0
            self.idle = 0 if member.waiting or member.running else self.idle + 1
