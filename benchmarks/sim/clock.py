"""Simulated time, and processes in it: generators that yield what they wait for."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

Resume = Callable[[], None]
Wait = Callable[[Resume], None]
"""What a process yields: called with what is to be called when the wait is over."""
Process = Generator[Wait, None, Any]


class Clock:
    """Runs what is due, in order of time; at equal times, in the order of the calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Resume]] = []
        self._soon: deque[Resume] = deque()
        self._count = 0

    def at(self, time: float, call: Resume) -> None:
        """Call something at a time that is not in the past."""
        heapq.heappush(self._due, (time, self._count, call))
        self._count += 1

    def soon(self, call: Resume) -> None:
        """Call something now, but not from here, so that a chain of a thousand waiting processes does not recurse."""
        self._soon.append(call)

    def start(self, process: Process, ended: Resume | None = None) -> None:
        """Let a process run from now on."""

        def resume() -> None:
            for wait in process:
                wait(resume)
                return
            if ended is not None:
                ended()

        self.soon(resume)

    def run(self) -> float:
        """Run until nothing is due any more; returns the time then."""
        soon, due = self._soon, self._due
        while soon or due:
            while soon:
                soon.popleft()()
            if due:
                self.now, _, call = heapq.heappop(due)
                call()
        return self.now

    def sleep(self, seconds: float) -> Wait:
        """Wait for a while."""
        return lambda resume: self.at(self.now + seconds, resume)

    def all_of(self, processes: Iterable[Process]) -> Wait:
        """Wait until several processes that start now have ended."""

        def wait(resume: Resume) -> None:
            own = list(processes)
            left = len(own)

            def ended() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    self.soon(resume)

            for process in own:
                self.start(process, ended)
            if not own:
                self.soon(resume)

        return wait


class Slots:
    """At most this many may be inside at once, the others queue. Counts what Little's law relates."""

    def __init__(self, clock: Clock, bound: int) -> None:
        self.clock, self.bound = clock, bound
        self.held = self.entered = 0
        self.inside_s = self.waiting_s = 0.0
        """Seconds that all have spent inside, and in the line."""
        self._line: deque[tuple[float, Resume]] = deque()
        self._since = 0.0

    @property
    def line(self) -> int:
        """How many are waiting."""
        return len(self._line)

    def take(self) -> Wait:
        """Wait until admitted."""

        def wait(resume: Resume) -> None:
            self._count()
            self._line.append((self.clock.now, resume))
            self._admit()

        return wait

    def give(self) -> None:
        """Leave, so that the next may enter."""
        self._count()
        self.held -= 1
        self._admit()

    def _admit(self) -> None:
        while self._line and self.held < self.bound:
            _, resume = self._line.popleft()
            self.held += 1
            self.entered += 1
            self.clock.soon(resume)

    def _count(self) -> None:
        passed = self.clock.now - self._since
        self.inside_s += passed * self.held
        self.waiting_s += passed * len(self._line)
        self._since = self.clock.now


class Thread:
    """Does one thing after the other, in order of arrival."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.busy_s = self._free = 0.0

    def work(self, seconds: float) -> Wait:
        """Wait in the queue, then for this much work."""

        def wait(resume: Resume) -> None:
            self.busy_s += seconds
            self._free = max(self._free, self.clock.now) + seconds
            self.clock.at(self._free, resume)

        return wait


class Pace:
    """This many per minute, one second's worth of them at once: the token bucket of
    `upshot/models/client/limits.py`."""

    def __init__(self, clock: Clock, per_minute: float) -> None:
        self.clock = clock
        self.apart = 60 / per_minute
        self.early = max(0.0, 1 - self.apart)
        """How far ahead of the even pace one may be."""
        self._next = 0.0

    def take(self) -> Wait:
        """Wait until one more may go."""

        def wait(resume: Resume) -> None:
            even = max(self._next, self.clock.now)
            self._next = even + self.apart
            self.clock.at(max(self.clock.now, even - self.early), resume)

        return wait
