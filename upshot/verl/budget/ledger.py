"""One budget and one set of limits over all workers of a run: who may have how much in flight, and what is spent.

A worker reports where it stands, every moment while it waits and a few times a second otherwise, and is granted its
part: slots of every endpoint, calls of the budget. In between it spends its part without asking anybody. Nothing here
knows of Ray; `share.py` is the worker's side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from upshot.models.client.budget import SPENT

BATCH = 8
"""Calls of the budget that a worker is handed at once, while there are plenty."""


@dataclass(frozen=True)
class EndpointLoad:
    """How a worker stands at one endpoint."""

    bound: int
    """Calls in flight that the endpoint takes, from all workers together."""
    cap: int
    """How many this worker lets in: what it was granted last."""
    held: int
    """How many are in flight; more than the cap for a while after that has shrunk."""
    waiting: int = 0
    slowest: float = 0.0
    """Seconds since the oldest call in flight was sent."""


@dataclass(frozen=True)
class WorkerReport:
    """What a worker says. Counts are of its whole life, so that a report said twice counts once."""

    worker: str
    spent: Mapping[str, float]
    allowed: int = 0
    """Calls that it may send in its life, as granted and not given back."""
    wants: int = 0
    """Calls that wait for leave."""
    loads: Mapping[str, EndpointLoad] = field(default_factory=dict)
    last: bool = False
    """Whether it is closed and will send nothing any more."""


@dataclass(frozen=True)
class WorkerGrant:
    """What a worker is told."""

    others: Mapping[str, float]
    """What everybody else has spent, earlier parts of the run among them."""
    allowed: int | None
    """Calls that it may send in its life; None: as many as it likes."""
    caps: Mapping[str, int]
    closing: bool = False
    """Whether the run is over: close the helpers and report for the last time."""


@dataclass
class _Worker:
    spent: dict[str, float]
    allowed: int = 0
    leased: dict[str, int] = field(default_factory=dict)
    """Slots by endpoint that count as its own, until it is known to have given them back."""
    loads: Mapping[str, EndpointLoad] = field(default_factory=dict)

    @property
    def calls(self) -> float:
        """Calls that it has sent or may send."""
        return max(self.allowed, self.spent["calls"])


class Ledger:
    """The books of a run."""

    def __init__(self, max_calls: int | None = None, spent: Mapping[str, float] | None = None) -> None:
        self.max_calls = max_calls
        self.closing = False
        self.workers: dict[str, _Worker] = {}
        self._before = dict.fromkeys(SPENT, 0.0) | dict(spent or {})

    def report(self, said: WorkerReport) -> WorkerGrant:
        """Hear a worker, and give it its part."""
        own = self.workers.setdefault(said.worker, _Worker(dict.fromkeys(SPENT, 0.0)))
        own.spent, own.allowed, own.loads = dict(said.spent), said.allowed, said.loads
        own.leased = {name: max(load.cap, load.held) for name, load in said.loads.items()}
        caps = {} if said.last else {name: self._cap(said.worker, name, load) for name, load in said.loads.items()}
        if not said.last:
            own.allowed += self._calls(said.wants)
        total = self.spent()
        if said.last:
            own.allowed = 0
            self.bury(said.worker)
        others = {what: total[what] - own.spent[what] for what in SPENT}
        return WorkerGrant(others, None if self.max_calls is None else own.allowed, caps, self.closing)

    def bury(self, worker: str) -> None:
        """A worker is gone: its slots are free again. Calls it had leave for may have been sent, and count as spent."""
        gone = self.workers.pop(worker, None)
        if gone is not None:
            self._before = _sum([self._before, {**gone.spent, "calls": gone.calls}])

    def spent(self) -> dict[str, float]:
        """What all have spent, as far as they have said."""
        return _sum([self._before, *(worker.spent for worker in self.workers.values())])

    def loads(self) -> dict[str, EndpointLoad]:
        """How all workers together stand at every endpoint."""
        out: dict[str, EndpointLoad] = {}
        for worker in self.workers.values():
            for name, load in worker.loads.items():
                out[name] = _together(out[name], load) if name in out else load
        return out

    def _cap(self, worker: str, name: str, load: EndpointLoad) -> int:
        """The slots of an endpoint for a worker: its fair part, of what nobody else has."""
        others = [other for who, other in self.workers.items() if who != worker]
        known = {who: w.loads[name] for who, w in self.workers.items() if name in w.loads}
        part = split_fairly(load.bound, {who: each.held + each.waiting for who, each in known.items()})[worker]
        cap = max(0, min(part, load.bound - sum(other.leased.get(name, 0) for other in others)))
        own = self.workers[worker].leased
        own[name] = max(own[name], cap)  # what it gives back it says with its next report
        return cap

    def _calls(self, wants: int) -> int:
        """How many calls more a worker may send."""
        if self.max_calls is None or not wants:
            return 0
        left = int(self.max_calls - self._before["calls"] - sum(worker.calls for worker in self.workers.values()))
        return max(0, min(left, max(wants, BATCH), max(1, left // (2 * len(self.workers)))))


def split_fairly(bound: int, demands: Mapping[str, int]) -> dict[str, int]:
    """Parts of a whole: nobody gets more than it wants while another wants more; what nobody wants goes to all alike.

    The smallest part goes to whom wants least, so that one who wants a single slot is not served last.
    """
    out: dict[str, int] = {}
    for place, name in enumerate(sorted(demands, key=lambda name: (demands[name], name))):
        out[name] = min(demands[name], -(-(bound - sum(out.values())) // (len(demands) - place)))
    left = bound - sum(out.values())
    return {name: part + left // len(out) + (place < left % len(out)) for place, (name, part) in enumerate(out.items())}


def describe_loads(loads: Mapping[str, EndpointLoad]) -> str:
    """How the endpoints stand, in a line; those that nobody calls are left out."""
    told = (
        f"{name}: {load.held} of {load.bound} calls in flight, {load.waiting} waiting, the slowest for "
        f"{load.slowest:.0f} s"
        for name, load in loads.items()
        if load.held or load.waiting
    )
    return "; ".join(told)


def _together(one: EndpointLoad, other: EndpointLoad) -> EndpointLoad:
    return EndpointLoad(
        max(one.bound, other.bound),
        one.cap + other.cap,
        one.held + other.held,
        one.waiting + other.waiting,
        max(one.slowest, other.slowest),
    )


def _sum(spendings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    spendings = list(spendings)
    return {what: sum(spending.get(what, 0) for spending in spendings) for what in SPENT}
