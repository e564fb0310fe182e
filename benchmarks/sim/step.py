"""One step, simulated: replies and their futures over workers, servers and endpoints, then learning and the sync."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.sim.clock import Clock, Process, Slots, Thread
from benchmarks.sim.servers import Endpoint, Limits, Pool, Server, draw
from benchmarks.sim.site import Site
from benchmarks.sim.work import POLICY, Chain, Work


@dataclass
class Played:
    """A reply that ended: when, and where its time went on the way that ended last."""

    ended: float = 0.0
    tokens: float = 0.0
    """Sampled in the episode: what is trained."""
    missing: bool = False
    """Whether no future of it has all its answers."""
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What a step took, in seconds, and how busy everybody was while it was played."""

    rollout: float
    learn: float
    sync: float
    lost: float
    """What failures cost: work since the last checkpoint, and starting again."""
    replies: tuple[Played, ...]
    calls: dict[str, int]
    failed: dict[str, int]
    busy: dict[str, float]
    """Share of the time that servers with full batches would need, or for which an endpoint's slots are held."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.rollout + self.learn + self.sync + self.lost

    @property
    def tail(self) -> float:
        """Seconds that the last twentieth of the replies took after the others."""
        ended = sorted(reply.ended for reply in self.replies)
        return ended[-1] - ended[math.ceil(0.95 * len(ended)) - 1]


class Stage:
    """Everybody of a step."""

    def __init__(self, work: Work, site: Site, gpus: int) -> None:
        self.clock = Clock()
        self.work, self.site = work, site
        servers = max(1, gpus // site.policy.gpus_per_server)
        self.pool = Pool(self.clock, site.policy.server, servers)
        self.endpoints = {
            place: Endpoint(self.clock, site.helper(place), work.limits.get(place, Limits()))
            for place in work.calls()
            if place != POLICY
        }
        self.gates = [Slots(self.clock, site.workers.in_flight) for _ in range(site.workers.count)]
        self.threads = [Thread(self.clock) for _ in range(site.workers.count)]


class Talk:
    """One conversation and what it has spent; its futures are forks on the same server and worker."""

    def __init__(self, context: Stage, worker: int, rng: random.Random) -> None:
        self.context, self.worker, self.rng = context, worker, rng
        self.server: Server | None = None
        self.parts: dict[str, float] = {}
        self.missing = False

    def fork(self) -> Talk:
        """A future of its own fate."""
        other = Talk(self.context, self.worker, random.Random(self.rng.random()))
        other.server, other.parts = self.server, dict(self.parts)
        return other

    def speak(self, prompt: float, tokens: float) -> Process:
        """A turn of the policy."""
        yield from self._thread()
        before = self.context.clock.now
        if self.server is None:  # a conversation stays where it began, for its prefix is there
            self.server = self.context.pool.least()
        yield self.server.generate(prompt, tokens)
        self._spent(POLICY, before)

    def ask(self, place: str, sequences: int = 1) -> Process:
        """A call of a helper; whether it answered."""
        if place == POLICY:
            helper = self.context.site.helper(place)
            yield from self.speak(helper.prompt_tokens, draw(helper.tokens, self.rng))
            return True
        yield from self._thread()
        before = self.context.clock.now
        answered = yield from self.context.endpoints[place].call(self.rng, sequences)
        self._spent(place, before)
        return answered

    def _thread(self) -> Process:
        """The worker's own work for a call: it has one thread."""
        workers = self.context.site.workers
        if workers.call_s:
            before = self.context.clock.now
            yield self.context.threads[self.worker].work(workers.call_s)
            self._spent("worker", before)

    def _spent(self, part: str, since: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + self.context.clock.now - since


def reply(context: Stage, worker: int, rng: random.Random, out: list[Played]) -> Process:
    """Play one reply with its futures."""
    work, policy = context.work, context.site.policy
    talk, played = Talk(context, worker, rng), Played()
    ends: list[Talk] = []
    forks: list[Process] = []
    yield context.gates[worker].take()
    for turn in range(work.turns):
        tokens = said(context, rng)
        yield from talk.speak(policy.prompt_tokens if turn == 0 else policy.turn_tokens, tokens)
        played.tokens += tokens
        last = turn == work.turns - 1
        if work.every_turn or last:
            forks += [future(talk.fork(), ends) for _ in range(work.samples if work.rounds else 1)]
        if not last:
            yield context.clock.sleep(draw(context.site.workers.environment_s, rng))
    forks += [classmate(talk.fork(), place, ends) for place in work.classmates]
    yield context.clock.all_of(forks)
    context.gates[worker].give()
    played.ended = context.clock.now
    played.parts = ends[-1].parts if ends else talk.parts
    played.missing = bool(ends) and all(end.missing for end in ends)
    out.append(played)


def future(talk: Talk, ends: list[Talk]) -> Process:
    """Rounds of user and policy, then the judges, side by side."""
    context, work = talk.context, talk.context.work
    for _ in range(work.rounds):
        if work.user is not None and not (yield from talk.ask(work.user)):
            talk.missing = True
            break
        if talk.rng.random() < context.site.leaves:
            break
        yield from talk.speak(context.site.policy.turn_tokens, said(context, talk.rng))
    if not talk.missing and work.judges:
        verdicts: list[Talk] = []
        yield context.clock.all_of([judged(talk.fork(), chain, verdicts) for chain in work.judges])
        talk.parts, talk.missing = verdicts[-1].parts, any(one.missing for one in verdicts)
    ends.append(talk)


def judged(talk: Talk, chain: Chain, verdicts: list[Talk]) -> Process:
    """One metric of a future: its calls one after the other."""
    for place in chain:
        if not (yield from talk.ask(place)):
            talk.missing = True
            break
    verdicts.append(talk)


def classmate(talk: Talk, place: str, ends: list[Talk]) -> Process:
    """A classmate's answers to the thought."""
    talk.missing = not (yield from talk.ask(place, talk.context.work.samples))
    ends.append(talk)


def said(context: Stage, rng: random.Random) -> float:
    """Tokens of one turn of the policy."""
    return max(1.0, min(draw(context.site.policy.reply_tokens, rng), context.work.max_tokens))


def play(work: Work, site: Site, gpus: int, seed: int = 0) -> Step:
    """Simulate one step. The draws of a reply hang on seed and place alone, whatever the machines are."""
    context = Stage(work, site, gpus)
    out: list[Played] = []
    for index in range(work.replies):
        rng = random.Random(f"{seed}/{index}")
        context.clock.start(reply(context, index * site.workers.count // work.replies, rng, out))
    rollout = noticed(context.clock.run(), site.workers.poll_s)
    tokens = sum(one.tokens + site.policy.prompt_tokens for one in out)
    learn = site.learn.fixed_s + tokens / (site.learn.tokens_per_s * gpus)
    nodes = max(1.0, gpus / site.learn.gpus_per_node)
    sync = site.learn.sync_s + site.learn.sync_per_doubling_s * math.log2(nodes)
    lost = cost_of_failures(rollout + learn + sync, work, site, gpus, random.Random(f"{seed}/failures"))
    return Step(
        rollout,
        learn,
        sync,
        lost,
        tuple(out),
        calls={POLICY: work.calls()[POLICY]} | {name: e.calls for name, e in context.endpoints.items()},
        failed={name: e.failed for name, e in context.endpoints.items()},
        busy=dict(_busy(context, rollout)),
    )


def noticed(seconds: float, every: float) -> float:
    """When something is seen that has happened, by who looks every so often."""
    return every * math.ceil(seconds / every) if every else seconds


def cost_of_failures(seconds: float, work: Work, site: Site, gpus: int, rng: random.Random) -> float:
    """Seconds lost to failures that begin in a step: each loses the work since a checkpoint, and starts again."""
    if not site.failures.gpu_hours:
        return 0.0
    every = site.failures.gpu_hours * 3600 / gpus
    lost, at = 0.0, rng.expovariate(1 / every)
    while at < seconds:
        lost += rng.randrange(work.save_every) * seconds + at + site.failures.restart_s
        at += rng.expovariate(1 / every)
    return lost


def _busy(context: Stage, seconds: float) -> Iterator[tuple[str, float]]:
    yield POLICY, _full(context.pool, seconds)
    yield "worker", sum(thread.busy_s for thread in context.threads) / max(seconds * len(context.threads), 1e-12)
    for name, endpoint in context.endpoints.items():
        inside = endpoint.slots.inside_s / max(seconds * endpoint.slots.bound, 1e-12)
        yield name, inside if endpoint.pool is None else _full(endpoint.pool, seconds)


def _full(pool: Pool, seconds: float) -> float:
    """The share of their time that servers would need for the same work with full batches."""
    work = sum(server.reading_s + server.tokens / server.speed.most_per_s for server in pool.servers)
    return work / max(seconds * len(pool.servers), 1e-12)
