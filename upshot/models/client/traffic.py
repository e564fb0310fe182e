"""How the calls of helper models stand while they are under way: who waits, how long, what had to be tried again.

`watch` says so in a log line (on stderr, unless a program sets up its own logging) as soon as a call is slow or fails,
and again while that lasts; nothing is said while everything answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)

EVERY_S = 10.0
"""Seconds between two looks, and from which a call counts as slow."""
SAID = 3
"""Reasons of retries that are named."""


class Traffic:
    """The calls of one model at this moment."""

    def __init__(self) -> None:
        self.queued = 0
        """Calls that wait for a free slot of the endpoint."""
        self._began: dict[int, float] = {}
        self._last = 0

    @contextmanager
    def queue(self) -> Iterator[None]:
        """A call waits for its turn."""
        self.queued += 1
        try:
            yield
        finally:
            self.queued -= 1

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call is under way."""
        self._last += 1
        own = self._last
        self._began[own] = time.monotonic()
        try:
            yield
        finally:
            del self._began[own]

    @property
    def under_way(self) -> int:
        """Calls that were sent and not answered yet."""
        return len(self._began)

    @property
    def slowest(self) -> float:
        """Seconds since the oldest of them was sent."""
        return time.monotonic() - min(self._began.values()) if self._began else 0.0


@dataclass(frozen=True)
class WatchedModel:
    """What `watch` knows of a model."""

    name: str
    traffic: Traffic
    troubles: Counter[str]
    """How often a call was tried again or failed, by reason, since the start."""


def tell(watched: Iterable[WatchedModel], before: Mapping[str, Counter[str]], slow_s: float = EVERY_S) -> str:
    """One line about the models with slow calls, or with retries since `before`; empty when there are none."""
    parts = []
    for model in watched:
        fresh = model.troubles - before.get(model.name, Counter())
        if model.traffic.slowest < slow_s and not fresh:
            continue
        said = f"{model.name}: {model.traffic.under_way} calls under way"
        if model.traffic.queued:
            said += f", {model.traffic.queued} queued"
        if model.traffic.under_way:
            said += f", the slowest for {model.traffic.slowest:.0f} s"
        if fresh:
            named = ", ".join(f"{reason} {count}" for reason, count in fresh.most_common(SAID))
            said += f", tried again or failed: {named}"
        parts.append(said)
    return "; ".join(parts)


async def watch(look: Callable[[], Iterable[WatchedModel]], every_s: float = EVERY_S) -> None:
    """Log how the calls stand, every so often, for as long as it runs."""
    before: dict[str, Counter[str]] = {model.name: Counter(model.troubles) for model in look()}
    while True:
        await asyncio.sleep(every_s)
        watched = list(look())
        said = tell(watched, before, every_s)
        if said:
            log.warning("waiting for %s", said)
        before = {model.name: Counter(model.troubles) for model in watched}
