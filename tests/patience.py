"""Time limits that follow the machine: a slow or busy one gets more time.

A time limit only keeps a test from waiting forever. It is given in seconds of a quiet machine and multiplied by how
much longer things take here and now. What a test is about is seen by events, counts and states, never by the clock.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

Seen = TypeVar("Seen")
LOOP_S = 0.02
"""CPU seconds of the loop below on the machine that the limits were written for."""


@lru_cache(maxsize=1)
def slower() -> float:
    """How many times longer a fixed loop takes on this machine, not counting other programs; at least 1."""

    def loop() -> float:
        began = time.process_time()
        sum(i * i % 7 for i in range(100_000))
        return time.process_time() - began

    return max(1.0, min(loop() for _ in range(3)) / LOOP_S)


def crowded() -> float:
    """How many programs per core want to run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting = os.getloadavg()[0]
    if (now := Path("/proc/loadavg")).exists():  # the average is a minute late
        waiting = max(waiting, float(now.read_text().split()[3].partition("/")[0]))
    return waiting / cores


def patience(seconds: float) -> float:
    """This many seconds of a quiet machine, converted to seconds here and now."""
    return seconds * slower() * max(1.0, crowded())


def wait_until(happened: Callable[[], Seen], seconds: float = 60.0, pause: float = 0.02) -> Seen:
    """Return what `happened` returns once it is true; raise an `AssertionError` if it never is."""
    left = seconds
    while not (seen := happened()):
        assert left > 0, f"it did not happen within {seconds:g} s of a quiet machine"
        began = time.monotonic()
        time.sleep(pause)
        left -= (time.monotonic() - began) * seconds / patience(seconds)
    return seen


async def until(happened: Callable[[], Seen], seconds: float = 60.0, pause: float = 0.005) -> Seen:
    """`wait_until` for the event loop."""
    left = seconds
    while not (seen := happened()):
        assert left > 0, f"it did not happen within {seconds:g} s of a quiet machine"
        began = time.monotonic()
        await asyncio.sleep(pause)
        left -= (time.monotonic() - began) * seconds / patience(seconds)
    return seen
