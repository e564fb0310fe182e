"""Model servers: sequences decoded together, and endpoints that are called with limits, retries and failures."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.sim.clock import Clock, Pace, Process, Resume, Slots, Wait
from benchmarks.sim.site import EndpointSite, Length, Speed

LONGEST_BACKOFF_S = 20.0


class Server:
    """One model server: a step gives every running sequence a token and takes the longer the more there are.

    A prompt that is read holds all of them up; what exceeds `max_running` waits in a line.
    """

    def __init__(self, clock: Clock, speed: Speed, pool: Pool | None = None) -> None:
        self.clock, self.speed, self.pool = clock, speed, pool
        self.load = 0
        """Sequences here, running or not."""
        self.tokens = 0.0
        """Generated so far."""
        self.busy_s = self.reading_s = 0.0
        """Seconds in which anything ran, and of reading prompts."""
        self._line: deque[tuple[float, float, Resume]] = deque()
        self._running: list[tuple[float, int, Resume]] = []
        """By the token count of the server (`_given`) at which each sequence ends."""
        self._given = 0.0
        """Tokens that a sequence would have got that was here from the beginning."""
        self._at = self._reads_until = 0.0
        self._number = self._plan_number = 0

    def generate(self, prompt: float, tokens: float) -> Wait:
        """Read this many new tokens of a prompt, then generate this many."""

        def wait(resume: Resume) -> None:
            self._advance()
            self._line.append((prompt, tokens, resume))
            self._changed(1)
            self._admit()

        return wait

    def _changed(self, by: int) -> None:
        self.load += by
        if self.pool is not None:
            self.pool.changed(self, by)

    def _advance(self) -> None:
        """What has been generated since the last look; the running sequences were the same all the time."""
        now = self.clock.now
        if self._running:
            decoding = now - max(self._at, self._reads_until)
            if decoding > 0:
                self._given += decoding / self.speed.token_s(len(self._running))
            self.busy_s += now - self._at
        self._at = now

    def _admit(self) -> None:
        while self._line and len(self._running) < self.speed.max_running:
            prompt, tokens, resume = self._line.popleft()
            reading = prompt / self.speed.prompt_tokens_per_s
            self.reading_s += reading
            self._reads_until = max(self._reads_until, self.clock.now) + reading
            self.tokens += tokens
            self._number += 1
            heapq.heappush(self._running, (self._given + tokens, self._number, resume))
        if self._running:
            self._plan_number += 1
            left = max(0.0, self._running[0][0] - self._given)
            begin = max(self.clock.now, self._reads_until)
            number = self._plan_number
            self.clock.at(begin + left * self.speed.token_s(len(self._running)), lambda: self._ended(number))

    def _ended(self, number: int) -> None:
        if number != self._plan_number:  # somebody has come since, and all was planned anew
            return
        self._advance()
        first = self._running[0][0]
        self._given = max(self._given, first)
        while self._running and self._running[0][0] <= self._given * (1 + 1e-12):
            self.clock.soon(heapq.heappop(self._running)[2])
            self._changed(-1)
        self._admit()


class Pool:
    """Servers by how many sequences they have, so that finding the least loaded of a thousand costs nothing."""

    def __init__(self, clock: Clock, speed: Speed, count: int) -> None:
        self.servers = [Server(clock, speed, self) for _ in range(count)]
        self._by_load: list[dict[Server, None]] = [dict.fromkeys(self.servers)]
        self._least = 0

    def least(self) -> Server:
        """A server with the fewest sequences."""
        while not self._by_load[self._least]:
            self._least += 1
        return next(iter(self._by_load[self._least]))

    def changed(self, server: Server, by: int) -> None:
        """A server has one more or one less."""
        if server.load == len(self._by_load):
            self._by_load.append({})
        del self._by_load[server.load - by][server]
        self._by_load[server.load][server] = None
        self._least = min(self._least, server.load)


@dataclass(frozen=True)
class Limits:
    """How the client calls an endpoint: the keys of `ModelSpec`."""

    concurrency: int = 64
    requests_per_minute: float | None = None
    timeout_s: float = 120.0
    retries: int = 6
    backoff_s: float = 0.2


class Endpoint:
    """A helper model as its callers see it: one line for a slot, attempts, an answer or none."""

    def __init__(self, clock: Clock, site: EndpointSite, limits: Limits) -> None:
        self.clock, self.site, self.limits = clock, site, limits
        self.slots = Slots(clock, limits.concurrency * site.replicas)
        self.pool = None if site.hosted else Pool(clock, site.server, site.replicas)
        self.calls = self.attempts = self.failed = 0
        self._pace = Pace(clock, limits.requests_per_minute) if limits.requests_per_minute else None

    def call(self, rng: random.Random, sequences: int = 1) -> Process:
        """One call to its end; whether it was answered. Its draws are the caller's own, whoever else calls."""
        self.calls += 1
        lengths = [draw(self.site.tokens, rng) for _ in range(sequences)]
        yield self.slots.take()
        if self._pace is not None:
            yield self._pace.take()
        answered = False
        for number in range(self.limits.retries + 1):
            self.attempts += 1
            seconds = draw(self.site.latency_s, rng) if self.site.latency_s is not None else 0.0
            yield self._answer(seconds, lengths)
            answered = seconds <= self.limits.timeout_s and rng.random() >= self.site.fails
            if answered:
                break
            if number < self.limits.retries:
                pause = min(LONGEST_BACKOFF_S, self.limits.backoff_s * 2**number)
                yield self.clock.sleep(pause * rng.uniform(0.5, 1.5))
        self.failed += not answered
        self.slots.give()
        return answered

    def _answer(self, seconds: float, lengths: Sequence[float]) -> Wait:
        if self.pool is None:
            return self.clock.sleep(min(seconds, self.limits.timeout_s))
        server = self.pool.least()
        if len(lengths) == 1:
            return server.generate(self.site.prompt_tokens, lengths[0])
        return self.clock.all_of(one(server.generate(self.site.prompt_tokens, tokens)) for tokens in lengths)


def one(wait: Wait) -> Process:
    """A process of a single wait."""
    yield wait


def draw(length: Length, rng: random.Random) -> float:
    """A number of a distribution: log-normal about its median, cut at its top."""
    value = length.median * math.exp(length.sigma * rng.gauss(0, 1)) if length.sigma else length.median
    return value if length.most is None else min(value, length.most)
