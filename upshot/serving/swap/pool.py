"""The pool: models that share one arena, brought in and out as their requests come.

While somebody waits for a model that is not there, a task looks once in every turn of the event loop: engines at work
have made a step since. Loads go on beside them; a model leaves when it has nothing to do, or after its quantum.
"""

from __future__ import annotations

import asyncio

import torch

from upshot.serving.swap.arena import PIECE, Arena
from upshot.serving.swap.order import decide
from upshot.serving.swap.overlay import MemoryLayout
from upshot.serving.swap.seat import PoolSlot

PAUSE = 0.0005
"""Seconds between two looks at a load that a GPU makes by itself."""


class ModelPool:
    """Models in one arena."""

    def __init__(self, overlay: MemoryLayout, device: str | torch.device, piece: int = PIECE) -> None:
        self.arena = Arena(overlay, torch.device(device))
        self.seats = {place.name: PoolSlot(self, place) for place in overlay.places}
        self.piece = piece
        """Bytes that a load copies at once."""
        on_gpu = self.arena.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.arena.device) if on_gpu else None
        """Loads run beside everything else."""
        self._minder: asyncio.Task[None] | None = None
        self.swaps = 0
        self.moved = 0
        """Bytes."""
        self.swap_s = self.waiting_s = 0.0

    def seat(self, name: str) -> PoolSlot | None:
        """The seat of a model; None: it has none here."""
        return self.seats.get(name)

    # --- who is there

    def bring(self, seat: PoolSlot) -> None:
        """Have a model there now, whoever has to leave."""
        if seat.here:
            return
        if seat.load is None:
            for rival in self._rivals(seat):
                self._finish(rival)
                rival.leave()
            self._come(seat)
        self._finish(seat)

    def _rivals(self, seat: PoolSlot) -> list[PoolSlot]:
        held = [self.seats[name] for name in self.arena.held]
        return [other for other in held if other is not seat and other.place.overlaps(seat.place)]

    def _come(self, seat: PoolSlot) -> None:
        self.arena.take()
        if self._stream is not None:
            # What others computed there is done, but the zeros that an engine begins with may not be.
            for other in self.seats.values():
                if other.engine is not None and other.place.overlaps(seat.place):
                    default = torch.cuda.default_stream(self.arena.device)
                    self._stream.wait_stream(other.engine.stream or default)
        seat.come(self._stream)

    @staticmethod
    def _finish(seat: PoolSlot) -> None:
        """Wait for a load that is under way."""
        if seat.load is not None:
            seat.load.wait()
            seat.arrive()

    def rest(self) -> None:
        """Give all memory back, captured steps too, until the next request: somebody else needs it for a while."""
        for seat in self.seats.values():
            self._finish(seat)
            seat.leave(keep_steps=False)
        if self.arena.there:
            self.arena.release()

    # --- turns

    def wake(self) -> None:
        """Make sure that somebody looks who is to come."""
        if self._minder is None or self._minder.done() or self._minder.get_loop() is not asyncio.get_running_loop():
            self._minder = asyncio.get_running_loop().create_task(self._mind())

    async def _mind(self) -> None:
        try:
            while self._awaited():
                self.tick()
                loading = self._stream is not None and any(seat.load for seat in self.seats.values())
                await asyncio.sleep(PAUSE if loading else 0)
        except BaseException as error:
            for seat in self.seats.values():  # else they would wait for ever
                seat.tell(error if isinstance(error, Exception) else RuntimeError("the pool was closed"))
            raise
        for seat in self.seats.values():
            seat.holds = False
            seat.tell()

    def _awaited(self) -> bool:
        return any(seat.load is not None or seat.seen().wanted for seat in self.seats.values())

    def tick(self) -> None:
        """Look once: who has come, who leaves, who begins to come."""
        for seat in self.seats.values():
            if seat.load is not None and seat.load.poll():
                seat.arrive()
        members = {seat.name: seat.seen() for seat in self.seats.values()}
        wanted = [member.place for member in members.values() if member.wanted]
        for name, seat in self.seats.items():
            seat.tick(members[name].here and any(place.overlaps(seat.place) for place in wanted))
        decision = decide([seat.seen() for seat in self.seats.values()])
        for seat in self.seats.values():
            seat.hold(seat.name in decision.hold)
        for name in decision.leave:
            self.seats[name].leave()
        for name in decision.come:
            self._come(self.seats[name])

    # --- what it took

    def count(self, seconds: float, size: int, waited: float) -> None:
        """A load is done."""
        self.swaps += 1
        self.swap_s += seconds
        self.moved += size
        self.waiting_s += waited

    def spent(self) -> dict[str, float]:
        """Loads, their seconds and GiB, and the seconds that models were waited for, since the last call."""
        names = ("swaps", "swap_s", "waiting_s")
        found = {f"time/pool/{name}": float(getattr(self, name)) for name in names}
        found["time/pool/swapped_gib"] = self.moved / 2**30
        self.swaps = self.moved = 0
        self.swap_s = self.waiting_s = 0.0
        return found

    async def aclose(self) -> None:
        """Nobody looks any more."""
        minder, self._minder = self._minder, None
        if minder is not None and not minder.done():
            minder.cancel()
            await asyncio.gather(minder, return_exceptions=True)
