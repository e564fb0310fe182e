"""Counters of a model's calls by role, and the state of calls in flight: calls, failures, tokens, cost, latency.

`watch` logs a line (on stderr, unless the program sets up its own logging) when a call is slow or fails, and repeats it
while that lasts; it is silent while all calls are answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

LATENCIES_KEPT = 4096
"""The number of latest calls that quantiles cover, so that memory stays constant."""
EVERY_S = 10.0
"""Seconds between two checks, and after which a call counts as slow."""
MOST_REASONS = 3
"""Most reasons of retries in a line."""


def quantile(values: list[float], q: float) -> float:
    """The q-quantile of sorted values (nearest rank)."""
    return values[min(len(values) - 1, int(q * len(values)))]


@dataclass
class RoleCount:
    """The counters of one role's calls."""

    calls: int = 0
    """Calls sent (cache hits are not calls)."""
    failed: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    cache_hits: int = 0
    """Completions served from the cache."""
    cache_misses: int = 0
    replicas: Counter[str] = field(default_factory=Counter)
    """Attempts, failures and opened breakers of each replica."""
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES_KEPT))
    """Seconds from the free slot to the answer, retries and their waits included."""

    def stats(self) -> dict[str, float]:
        """The counters as numbers."""
        out: dict[str, float] = {"calls": self.calls, "failed": self.failed.total(), "retries": self.retries.total()}
        out |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "cost": self.cost}
        for kind, counts in (("failed", self.failed), ("retries", self.retries), ("replica", self.replicas)):
            out |= {f"{kind}/{what}": count for what, count in counts.items()}
        if self.latencies:
            ordered = sorted(self.latencies)
            out |= {"latency_p50": quantile(ordered, 0.5), "latency_p95": quantile(ordered, 0.95)}
        requested = self.cache_hits + self.cache_misses
        if requested:
            out |= {"cache_hits": self.cache_hits, "cache_hit_rate": self.cache_hits / requested}
        return out


class UsageMeter:
    """A model's counts by role, and its calls at this moment."""

    def __init__(self, name: str = "", timeout_s: float = 0.0, way_out: str = "") -> None:
        self.name = name
        self.timeout_s = timeout_s
        """Time limit of one attempt in seconds; 0: none."""
        self.way_out = way_out
        """What to set if calls take longer than that."""
        self.queued = 0
        """Calls that wait for a free slot of the endpoint."""
        self._began: dict[object, tuple[float, str]] = {}
        """When each call in flight was sent, and for which role."""
        self._roles: defaultdict[str, RoleCount] = defaultdict(RoleCount)
        self._restored: Counter[str] = Counter()
        """Retries and failures of the process that this one continues."""

    def role(self, name: str) -> RoleCount:
        """The counters of a role."""
        return self._roles[name]

    @contextmanager
    def count_under_way(self, role: str = "") -> Iterator[None]:
        """Inside, a call of a role is in flight."""
        call = object()
        self._began[call] = time.monotonic(), role
        try:
            yield
        finally:
            del self._began[call]

    @property
    def under_way(self) -> int:
        """Calls that were sent and not answered yet."""
        return len(self._began)

    @property
    def slowest(self) -> float:
        """Seconds since the oldest of them was sent."""
        return time.monotonic() - min(began for began, _ in self._began.values()) if self._began else 0.0

    @property
    def whom(self) -> str:
        """The roles that are waited for, and the model that plays them."""
        roles = [f"the {role}" for role in dict.fromkeys(role for _, role in self._began.values()) if role]
        return f"{' and '.join(roles)} ({self.name})" if roles else self.name

    def cache_hits(self) -> tuple[int, int]:
        """(completions from the cache, completions asked of it), over all roles."""
        hits = sum(count.cache_hits for count in self._roles.values())
        return hits, hits + sum(count.cache_misses for count in self._roles.values())

    def troubles(self) -> Counter[str]:
        """Retries and failures of this process by reason, over all roles."""
        return sum((count.retries + count.failed for count in self._roles.values()), Counter()) - self._restored

    def stats(self) -> dict[str, float]:
        """All counters; those of a named role are called `role/counter`."""
        out: dict[str, float] = {}
        for name, count in self._roles.items():
            out |= {f"{name}/{key}" if name else key: value for key, value in count.stats().items()}
        return out

    def state(self) -> dict[str, Any]:
        """All counters by role, to be saved; latencies are left out because they belong to one process."""
        return {
            name: {key: value for key, value in vars(count).items() if key != "latencies"}
            for name, count in self._roles.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        for name, saved in state.items():
            counters: dict[str, Any] = {k: Counter(v) if isinstance(v, dict) else v for k, v in saved.items()}
            vars(self.role(name)).update(counters)  # calls in flight keep counting in it
        self._restored = Counter()
        self._restored = self.troubles()


def describe_waits(meters: Iterable[UsageMeter], before: Mapping[str, Counter[str]], slow_s: float = EVERY_S) -> str:
    """One line about the models with slow calls, or with retries since `before`; empty if nothing is slow or
    retried."""
    parts = []
    for meter in meters:
        fresh = meter.troubles() - before.get(meter.name, Counter())
        if meter.slowest < slow_s and not fresh:
            continue
        line = f"{meter.whom}: {meter.under_way} calls in progress"
        if meter.queued:
            line += f", {meter.queued} queued"
        if meter.under_way:
            line += f", the slowest for {meter.slowest:.0f} s"
        if fresh:
            reasons = ", ".join(f"{reason} {count}" for reason, count in fresh.most_common(MOST_REASONS))
            line += f", retried or failed: {reasons}"
        if "timeout" in fresh or meter.slowest > meter.timeout_s / 2 > 0:
            line += f"; {meter.way_out}"
        parts.append(line)
    return "; ".join(parts)


async def watch(look: Callable[[], Iterable[UsageMeter]], every_s: float = EVERY_S) -> None:
    """Log the state of slow or failing calls regularly, until it is cancelled."""
    before = {meter.name: meter.troubles() for meter in look()}
    while True:
        await asyncio.sleep(every_s)
        meters = list(look())
        line = describe_waits(meters, before, every_s)
        if line:
            log.warning("waiting for %s", line)
        before = {meter.name: meter.troubles() for meter in meters}
