"""The processes of a run: alone, or several of one machine that `torchrun` started (`process_group.py`). No torch.

Every rank has the whole model, an engine on it, and its share of the work: it plays some of a step's groups and learns
from some of its sequences. What was played and read is handed to all, so that everything in between (statistics,
advantages, decisions) is computed by each rank alike, from the same numbers, by the same code as in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from upshot.models.client.budget import Budget

T = TypeVar("T")


class Ranks:
    """This process among those of its run; here: the only one."""

    rank = 0
    size = 1
    agreed = False
    """Whether all ranks have stopped after the same update …"""
    reason = ""
    """… and why."""
    collectives: Any = None
    """The module torch.distributed, where there are several: for tensors, while all ranks update or save together."""

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and tells."""
        return self.rank == 0

    def own(self, count: int) -> range:
        """Which of `count` things this rank does."""
        return range(self.rank, count, self.size)

    async def gather_own(self, topic: str, mine: list[T]) -> list[T]:
        """What all ranks did of their `own` things, in the order of the things; the event loop goes on meanwhile."""
        return mine

    def all_gather_object(self, topic: str, mine: T) -> list[T]:
        """What every rank gives for a topic, in the order of the ranks."""
        return [mine]

    def broadcast_object(self, topic: str, value: T) -> T:
        """The first rank's value."""
        return self.all_gather_object(topic, value)[0]

    def barrier(self, topic: str) -> None:
        """Return when all ranks are here."""
        self.all_gather_object(topic, None)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Inside, all ranks change the weights together; a rank that has to stop does so before or after."""
        yield

    def stop(self, reason: str, whole: bool) -> bool:
        """This rank ends its run: whether all ranks do so after the same update, each with a `whole` state to save."""
        return whole

    def leave(self) -> None:
        """The run is over for this rank."""

    def share(self, budget: Budget) -> None:
        """Count what the run spends over all ranks."""


ALONE = Ranks()


def interleave(parts: Sequence[Sequence[T]]) -> list[T]:
    """What ranks did of their `own` things, in the order of the things."""
    count = sum(map(len, parts))
    return [parts[i % len(parts)][i // len(parts)] for i in range(count)]


def shares(sizes: Sequence[int], ranks: int) -> list[range]:
    """Things in order cut into runs of about the same size, one for each rank: neighbours stay together."""
    total, done, cuts = sum(sizes), 0, [0]
    for i, size in enumerate(sizes):
        # A thing goes to the rank in whose part of the whole its middle lies.
        middle = (done + size / 2) * ranks / max(total, 1)
        while len(cuts) <= min(int(middle), ranks - 1):
            cuts.append(i)
        done += size
    cuts += [len(sizes)] * (ranks + 1 - len(cuts))
    return [range(start, stop) for start, stop in pairwise(cuts)]


def assign(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that each thing goes to, so that all have about as much: large ones first, to the one with least."""
    load, out = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        out[i] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[out[i]] += sizes[i]
    return out


Counts = Mapping[str, Any]
"""Numbers by name, and such mappings by name."""


def add_counts(before: Counts, now: Sequence[Counts]) -> dict[str, Any]:
    """Counters of the whole: what they were, and what each rank has counted since."""
    out: dict[str, Any] = {}
    for name in dict.fromkeys(name for counts in (before, *now) for name in counts):
        values = [counts[name] for counts in now if name in counts]
        if any(isinstance(value, Mapping) for value in [*values, before.get(name)]):
            out[name] = add_counts(before.get(name) or {}, values)
        else:
            base = before.get(name, 0)
            out[name] = base + sum(value - base for value in values)
    return out


def sum_by_name(logs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Values that add up, by name."""
    out: dict[str, float] = {}
    for logs_of_rank in logs:
        for name, value in logs_of_rank.items():
            out[name] = out.get(name, 0.0) + value
    return out
