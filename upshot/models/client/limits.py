"""Limits of an endpoint: calls in flight, calls per minute and tokens per minute."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from upshot.config.model_spec import ModelSpec


class Pace:
    """A token bucket that holds one second's worth; first come, first served."""

    def __init__(self, per_minute: float) -> None:
        self.whole = self.rate = per_minute / 60
        self.capacity = max(1.0, self.rate)
        self._level = self.capacity
        self._filled = time.monotonic()
        self._turn = asyncio.Lock()

    async def take(self, amount: float) -> None:
        """Wait until `amount` may be used; if the bucket holds less, later callers wait for the difference."""
        async with self._turn:
            while (missing := min(amount, self.capacity) - self._fill()) > 0:
                await asyncio.sleep(missing / self.rate)
            self._level -= amount

    def share(self, part: float) -> None:
        """From now on, use only this part of the pace; other processes have the rest."""
        self._fill()
        self.rate = self.whole * part
        self.capacity = max(1.0, self.rate)

    def correct(self, amount: float) -> None:
        """Account for using more (or, if negative, less) than was taken."""
        self._level = min(self.capacity, self._level - amount)

    def _fill(self) -> float:
        now = time.monotonic()
        self._level = min(self.capacity, self._level + (now - self._filled) * self.rate)
        self._filled = now
        return self._level


class CallSlots:
    """Limits the calls in flight to a bound that may change; first come, first served."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        """Most calls in flight from all processes together."""
        self.processes = 1
        """The number of processes that share the bound; each may have at least one call in flight."""
        self.held = 0
        self._line: deque[asyncio.Future[None]] = deque()

    def share(self, processes: int) -> None:
        """From now on admit only a share of the bound, also after it changes; calls in flight continue."""
        self.processes = processes
        self._admit()

    def resize(self, bound: int) -> None:
        """Set how many calls are admitted from now on; calls in flight continue."""
        self.bound = bound
        self._admit()

    async def acquire(self) -> None:
        """Wait until a call may be sent."""
        turn = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        self._admit()
        try:
            if not turn.done():
                await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted and cancelled at once
                self.release()
            raise

    def release(self) -> None:
        """Count a call as ended, and admit the next."""
        self.held -= 1
        self._admit()

    def _admit(self) -> None:
        bound = max(1, self.bound // self.processes)
        while self._line and self.held < bound:
            turn = self._line.popleft()
            if not turn.done():
                self.held += 1
                turn.set_result(None)


class EndpointLimits:
    """The limits of one endpoint, shared by every role that calls it."""

    def __init__(
        self, concurrency: int, requests_per_minute: float | None = None, tokens_per_minute: float | None = None
    ):
        self.concurrency = concurrency
        self.slots = CallSlots(concurrency)
        """Held by each call in flight, also while it backs off, so that a busy endpoint is called less."""
        self._requests = Pace(requests_per_minute) if requests_per_minute else None
        self.tokens = Pace(tokens_per_minute) if tokens_per_minute else None

    @classmethod
    def of(cls, spec: ModelSpec) -> EndpointLimits:
        """The limits a spec asks for."""
        return cls(spec.concurrency, spec.requests_per_minute, spec.tokens_per_minute)

    def share(self, processes: int) -> None:
        """Take one of `processes` equal shares of what the endpoint allows."""
        self.slots.share(processes)
        for pace in (self._requests, self.tokens):
            if pace is not None:
                pace.share(1 / processes)

    async def pace(self, tokens: float) -> None:
        """Wait until one more request of about `tokens` tokens may be sent."""
        if self._requests:
            await self._requests.take(1)
        if self.tokens:
            await self.tokens.take(tokens)
