"""Chooses the replica for a call: the conversation's home, or else the least loaded one. Failing replicas pause.

Nothing here sends anything. Every call has a home among the replicas that are up, where its prefix is cached
(rendezvous hashing: a replica that comes or goes moves only its own conversations). It goes there unless the home is
clearly more loaded than another replica. After its pause, a failed replica is tried by the very next call, whatever the
call's home is; otherwise a replica that is home to few conversations would stay out long after it has recovered. A call
waits if all replicas are full.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

from upshot.core.conversation import Message
from upshot.core.http_client import AttemptError
from upshot.models.base import Request
from upshot.models.client.limits import CallSlots

PREFIX_IDS = 512
"""The number of first token ids by which conversations are distinguished if only ids are given."""
FAILURES = 3
"""Consecutive failures after which a replica's breaker opens."""
PAUSE_S = 2.0
"""Seconds until one call tries it again; doubles with each such trial."""
LONGEST_PAUSE_S = 60.0


@dataclass(eq=False)
class Replica:
    """One address, its load and its circuit breaker."""

    url: str
    in_flight: int = 0
    asked_at: float = 0.0
    rests_until: float = 0.0
    """It asked us (429) not to call before then."""
    opened: int = 0
    """How often its breaker opened after having been closed."""
    _failures: int = 0
    """In a row."""
    _trials: int = 0
    """Since the breaker opened."""
    _out_until: float | None = None

    @property
    def is_out(self) -> bool:
        """Whether its last calls failed and none has succeeded since."""
        return self._out_until is not None

    def takes_calls(self, now: float) -> bool:
        """Whether a call may be sent: no rate limit applies, and the breaker is closed or a trial is due."""
        return now >= self.rests_until and (self._out_until is None or now >= self._out_until)

    def begin(self, now: float) -> None:
        """Count a call that is sent. The first one after the pause is a trial, and begins the next, longer pause."""
        self.in_flight += 1
        self.asked_at = now
        if self._out_until is not None and now >= self._out_until:
            self._trials += 1
            self.put_out(now)

    def record_answer(self) -> None:
        """Note an answer: the breaker closes."""
        self._failures, self._trials, self._out_until = 0, 0, None

    def record_failure(self, now: float) -> None:
        """Note a failed call; calls that were in flight when the breaker opened do not prolong the pause."""
        self._failures += 1
        if not self.is_out and self._failures >= FAILURES:
            self.put_out(now)

    def put_out(self, now: float) -> None:
        """Open the breaker."""
        self.opened += not self.is_out
        self._out_until = now + min(PAUSE_S * 2**self._trials, LONGEST_PAUSE_S)


def prefix_key(request: Request) -> bytes:
    """A hash of what all calls of a conversation share: the messages up to the first that is not a system message."""
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


class Routing:
    """The replicas of a model, their loads and breakers; shared by all roles that name the same addresses."""

    def __init__(self, concurrency: int, slots: CallSlots, clock: Callable[[], float] = time.monotonic) -> None:
        self.concurrency = concurrency
        """Calls in flight at each replica."""
        self.slack = max(2, concurrency // 8)
        self.replicas: dict[str, Replica] = {}
        self._slots, self._clock = slots, clock
        self.change = asyncio.Event()
        """Set and replaced whenever there may be room for a waiting call."""

    @property
    def up(self) -> int:
        """Replicas whose breaker is closed."""
        return sum(not replica.is_out for replica in self.replicas.values())

    def update(self, urls: Sequence[str]) -> None:
        """Set the current replicas; calls in flight at a removed one may finish."""
        self.replicas = {url: self.replicas.get(url) or Replica(url) for url in urls}
        self.notify()

    def take(self, key: bytes, avoid: Collection[str] = ()) -> Replica | None:
        """The replica for a call, to be returned by `leave`; None while all that may be called are full.

        Raises `AttemptError` when no replica is listed, or when all asked us to wait.
        """
        candidates = self.open_to_calls(avoid) or [self._last_resort()]
        free = [replica for replica in candidates if replica.in_flight < self.concurrency]
        if not free:
            return None
        due = [replica for replica in free if replica.is_out]
        replica = pick(due or free, key, self.slack)
        replica.begin(self._clock())
        return replica

    def leave(self, replica: Replica) -> None:
        """Note the end of a call, successful or not."""
        replica.in_flight -= 1
        self.notify()

    def record_failure(self, replica: Replica, error: AttemptError) -> bool:
        """Note a failed call; returns whether it opened the breaker. A 429 counts as an answer: call again later."""
        if error.reason == "rate_limited":
            replica.record_answer()
            replica.rests_until = self._clock() + (error.wait_s or 0.0)
            return False
        before = replica.opened
        replica.record_failure(self._clock())
        return replica.opened > before

    def put_out(self, url: str) -> None:
        """Send nothing there for now."""
        if url in self.replicas:
            self.replicas[url].put_out(self._clock())
            self.notify()

    def notify(self) -> None:
        """After a change, wake up the calls that wait for room."""
        self._slots.resize(self.concurrency * max(1, self.up))
        change, self.change = self.change, asyncio.Event()
        change.set()

    def open_to_calls(self, avoid: Collection[str]) -> list[Replica]:
        """The replicas, without those to avoid, that may be called."""
        now = self._clock()
        return [replica for url, replica in self.replicas.items() if url not in avoid and replica.takes_calls(now)]

    def _last_resort(self) -> Replica:
        """The replica to call if all breakers are open: each in turn, because refusing every call would help nobody."""
        if not self.replicas:
            raise AttemptError("connection", "no replica is listed")
        now = self._clock()
        resting = [r.rests_until for r in self.replicas.values() if r.rests_until > now and not r.is_out]
        if resting:
            raise AttemptError("rate_limited", "all replicas asked us to wait", min(resting) - now)
        return min(self.replicas.values(), key=lambda replica: replica.asked_at)
