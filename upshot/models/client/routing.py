"""Which replica takes a call: home by prefix, else the least loaded; and when a second one is asked.

Nothing here sends anything. Every call has a home among the replicas that are up (rendezvous hashing, so that one that
comes or goes moves only its own conversations) and goes there unless that one is clearly more loaded than another.
A call that finds all of them full waits in line for the first free place, wherever that will be.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast

from upshot.core.conversation import Message
from upshot.models.base import Request
from upshot.models.client.breaker import Breaker
from upshot.models.client.guarded import AttemptFailed
from upshot.models.client.limits import CallSlots
from upshot.models.client.usage import quantile

PREFIX_IDS = 512
"""Token ids that tell conversations apart where only ids are given."""
HEDGE_QUANTILE = 0.95
HEDGE_SAMPLE = 20
"""Calls to have seen before one is called late."""
LATENCIES_KEPT = 256
SILENT_S = 1.0
"""Less than that without an answer is no silence."""


@dataclass(eq=False)
class Replica:
    """One address and what is known of it."""

    url: str
    breaker: Breaker = field(default_factory=Breaker)
    in_flight: int = 0
    asked_at: float = 0.0
    answered_at: float = 0.0
    """When it last answered a call."""
    rests_until: float = 0.0
    """It asked us (429) to stay away until then."""


@dataclass(eq=False, slots=True)
class ReplicaSlot:
    """The right to send one call to a replica; given back with `Routing.leave`."""

    replica: Replica
    began: float
    trial: bool
    """Whether the breaker waits for what comes of it."""
    left: bool = False


def prefix_key(request: Request) -> bytes:
    """What all calls of a conversation have in common: the messages up to the first that is no system message."""
    if request.by_ids:
        content: Any = list(request.prompt[:PREFIX_IDS])
    else:
        messages = cast("Sequence[Message]", request.prompt)
        first = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
        content = [message.to_dict() for message in messages[: first + 1]]
    return blake2b(json.dumps(content, sort_keys=True, default=dict).encode(), digest_size=16).digest()


def pick(free: Sequence[Replica], key: bytes, slack: int) -> Replica:
    """The key's home among the free replicas, unless it has more than `slack` calls more than the least loaded."""
    closeness = {replica: blake2b(replica.url.encode(), key=key, digest_size=8).digest() for replica in free}
    home = max(free, key=lambda replica: closeness[replica])
    least = min(replica.in_flight for replica in free)
    if home.in_flight <= least + slack:
        return home
    return max((replica for replica in free if replica.in_flight == least), key=lambda replica: closeness[replica])


@dataclass(eq=False)
class _Waiter:
    key: bytes
    avoid: Collection[str]
    place: asyncio.Future[ReplicaSlot | None]


class Routing:
    """The replicas of a model, their loads and breakers; shared by all roles that name the same addresses."""

    def __init__(
        self, concurrency: int, slots: CallSlots, share: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.concurrency = concurrency
        self.slack = max(2, concurrency // 8)
        self.replicas: dict[str, Replica] = {}
        self._slots = slots
        self._share = share
        self._clock = clock
        self._line: list[_Waiter] = []
        self._latencies: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LATENCIES_KEPT))
        self._calls = self._hedges = 0

    @property
    def up(self) -> int:
        """Replicas whose breaker is closed."""
        return sum(not replica.breaker.is_open for replica in self.replicas.values())

    def update(self, urls: Sequence[str]) -> None:
        """These are the replicas now; calls under way at one that left are let finish."""
        self.replicas = {url: self.replicas.get(url) or Replica(url) for url in urls}
        self._changed()

    def trip(self, url: str) -> None:
        """Send nothing there for now."""
        if url in self.replicas:
            self.replicas[url].breaker.trip(self._clock())
            self._changed()

    def enter(self, key: bytes, avoid: Collection[str] = ()) -> asyncio.Future[ReplicaSlot | None]:
        """A place for a call, now or when one is free; `AttemptFailed` when none can be (None: never from here)."""
        self._calls += not avoid
        waiter = _Waiter(key, avoid, asyncio.get_running_loop().create_future())
        if not self._serve(waiter):
            self._line.append(waiter)
        return waiter.place

    def hedge(self, key: bytes, avoid: Collection[str], late: ReplicaSlot) -> ReplicaSlot | None:
        """A place for a second try of a late call, if there is a free one and the share of such calls allows it.

        Where the first replica is out by now, or silent, it is no straggler, and the share is no matter.
        """
        astray = late.replica.breaker.is_open or self._silent(late)
        free = self._free(avoid) if astray or self._hedges + 1 <= self._share * self._calls else []
        if not free:
            return None
        self._hedges += not astray
        return self._take(pick(free, key, self.slack))

    def hedge_after(self, role: str) -> float | None:
        """Seconds after which a call of a role is late, by its last ones; None: it is not to be hedged."""
        latencies = self._latencies[role]
        if not self._share or len(self.replicas) < 2 or len(latencies) < HEDGE_SAMPLE:
            return None
        return quantile(sorted(latencies), HEDGE_QUANTILE)

    def succeeded(self, place: ReplicaSlot, role: str) -> None:
        """A role's call was answered."""
        self._latencies[role].append(self._clock() - place.began)
        self.answered(place)

    def answered(self, place: ReplicaSlot) -> None:
        """The replica is there, though it may have refused the call."""
        replica = place.replica
        replica.breaker.succeeded()
        replica.answered_at = self._clock()
        place.trial = False

    def failed(self, place: ReplicaSlot, failure: AttemptFailed) -> bool:
        """The call was not answered; whether that opened the breaker. A 429 is an answer: come back later."""
        if failure.reason == "rate_limited":
            self.answered(place)
            place.replica.rests_until = self._clock() + (failure.wait_s or 0.0)
            return False
        return self._not_answered(place)

    def overtaken(self, place: ReplicaSlot) -> bool:
        """A late call was answered by a second replica; whether that opened the breaker of the first.

        A server that hangs fails no call before the timeout, and would draw call after call until then.
        """
        return not place.left and self._not_answered(place)

    def _not_answered(self, place: ReplicaSlot) -> bool:
        breaker = place.replica.breaker
        before = breaker.opened
        breaker.failed(self._clock(), place.trial)
        place.trial = False
        return breaker.opened > before

    def leave(self, place: ReplicaSlot) -> None:
        """The call is over, whatever came of it; saying so twice is saying it once."""
        if place.left:
            return
        place.left = True
        place.replica.in_flight -= 1
        if place.trial:
            place.replica.breaker.abandoned()
        self._changed()

    def others(self, avoid: Collection[str]) -> bool:
        """Whether any replica besides these may be called."""
        return bool(self._open_to_calls(avoid))

    def _silent(self, place: ReplicaSlot) -> bool:
        """Whether a replica has answered nobody since a call began there, while others have, or have nothing to do."""
        if place.replica.answered_at >= place.began or self._clock() - place.began < SILENT_S:
            return False
        others = [replica for replica in self.replicas.values() if replica is not place.replica]
        return any(other.answered_at > place.began for other in others) or not any(o.in_flight for o in others)

    def _open_to_calls(self, avoid: Collection[str]) -> list[Replica]:
        now = self._clock()
        return [
            replica
            for url, replica in self.replicas.items()
            if url not in avoid and now >= replica.rests_until and replica.breaker.lets_through(now)
        ]

    def _free(self, avoid: Collection[str]) -> list[Replica]:
        return [replica for replica in self._open_to_calls(avoid) if replica.in_flight < self.concurrency]

    def _take(self, replica: Replica) -> ReplicaSlot:
        replica.in_flight += 1
        now = replica.asked_at = self._clock()
        return ReplicaSlot(replica, now, replica.breaker.begin(now))

    def _serve(self, waiter: _Waiter) -> bool:
        """Give the waiter a place, or the reason why there will be none; False: it has to wait."""
        if waiter.place.done():
            return True
        try:
            candidates = self._open_to_calls(waiter.avoid) or [self._last_resort()]
        except AttemptFailed as failure:
            waiter.place.set_exception(failure)
            return True
        free = [replica for replica in candidates if replica.in_flight < self.concurrency]
        if free:
            waiter.place.set_result(self._take(pick(free, waiter.key, self.slack)))
        return bool(free)

    def _last_resort(self) -> Replica:
        """Where to go when all are out, each in turn: a breaker with nothing beside it would protect nobody."""
        if not self.replicas:
            raise AttemptFailed("connection", "no replica is listed")
        now = self._clock()
        resting = [r.rests_until for r in self.replicas.values() if r.rests_until > now and not r.breaker.is_open]
        if resting:
            raise AttemptFailed("rate_limited", "all replicas asked us to wait", min(resting) - now)
        return min(self.replicas.values(), key=lambda replica: replica.asked_at)

    def _changed(self) -> None:
        self._slots.resize(self.concurrency * max(1, self.up))
        self._line = [waiter for waiter in self._line if not self._serve(waiter)]
