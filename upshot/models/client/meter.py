"""Counters of a model's calls by role: calls, failures by reason, retries, tokens, cost, latency, cache hits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LATENCIES_KEPT = 4096
"""Quantiles are of the last so many calls, so that memory stays flat."""


def quantile(values: list[float], q: float) -> float:
    """The q-quantile of sorted values (nearest rank)."""
    return values[min(len(values) - 1, int(q * len(values)))]


@dataclass
class RoleCount:
    """What one role's calls came to."""

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
    hedges: int = 0
    """Late calls that a second replica was asked for, too."""
    hedges_won: int = 0
    """Those that the second one answered first."""
    replicas: Counter[str] = field(default_factory=Counter)
    """Attempts, failures and opened breakers of each replica."""
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES_KEPT))
    """Seconds from the free slot to the answer, retries and their waits included."""

    def stats(self) -> dict[str, float]:
        """The counters as numbers."""
        out: dict[str, float] = {
            "calls": self.calls,
            "failed": sum(self.failed.values()),
            "retries": sum(self.retries.values()),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost": self.cost,
        }
        out |= {f"failed/{reason}": count for reason, count in self.failed.items()}
        out |= {f"retries/{reason}": count for reason, count in self.retries.items()}
        if self.replicas:
            out |= {"hedges": self.hedges, "hedges_won": self.hedges_won}
            out |= {f"replica/{what}": count for what, count in self.replicas.items()}
        if self.latencies:
            ordered = sorted(self.latencies)
            out |= {"latency_p50": quantile(ordered, 0.5), "latency_p95": quantile(ordered, 0.95)}
        asked = self.cache_hits + self.cache_misses
        if asked:
            out |= {"cache_hits": self.cache_hits, "cache_hit_rate": self.cache_hits / asked}
        return out


class UsageMeter:
    """Counts by role."""

    def __init__(self) -> None:
        self._roles: dict[str, RoleCount] = {}

    def role(self, name: str) -> RoleCount:
        """The counters of a role."""
        if name not in self._roles:
            self._roles[name] = RoleCount()
        return self._roles[name]

    def cache_hits(self) -> tuple[int, int]:
        """(completions from the cache, completions asked of it), over all roles."""
        hits = sum(count.cache_hits for count in self._roles.values())
        return hits, hits + sum(count.cache_misses for count in self._roles.values())

    def troubles(self) -> Counter[str]:
        """Retries and failures by reason, over all roles."""
        return sum((count.retries + count.failed for count in self._roles.values()), Counter())

    def stats(self) -> dict[str, float]:
        """All counters; those of a named role are called `role/counter`."""
        out: dict[str, float] = {}
        for name, count in self._roles.items():
            out |= {f"{name}/{key}" if name else key: value for key, value in count.stats().items()}
        return out

    def state(self) -> dict[str, Any]:
        """All counters by role, to be saved; latencies are of one process and left out."""
        return {name: _saved(count) for name, count in self._roles.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        for name, saved in state.items():
            counters: dict[str, Any] = {
                key: Counter(value) if isinstance(value, dict) else value for key, value in saved.items()
            }
            vars(self.role(name)).update(counters)  # calls under way count on in it


def _saved(count: RoleCount) -> dict[str, Any]:
    return {key: value for key, value in vars(count).items() if key != "latencies"}
