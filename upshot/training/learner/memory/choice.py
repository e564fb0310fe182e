"""Which settings of a run fit into a device, and which of them are the fastest. No torch, no weights.

Of what fits the cheapest in time is taken (`cost`): small micro-batches, blocks computed again on the way back, an
engine that is parked while the learner works, helpers that take turns, adapters that are called and few keys and values
each cost something. What is left of the memory is for keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from upshot.serving.swap.overlay import MemoryLayout, aligned, laid
from upshot.training.learner.memory.plan import (
    GPU_PARTS,
    PAGES,
    WITHOUT_PLAN,
    Checkpointing,
    Helpers,
    MemoryJob,
    MemoryPlan,
    MemorySetting,
    Merging,
    RequestedSetting,
    parts_of,
)

BUSY, BUSY_SMALL, SMALL = 8192, 32768, 500_000_000
"""Tokens of a micro-batch that keep a GPU busy; of models with fewer parameters than the last."""
LEAST = 1024
"""No micro-batch is planned smaller, unless the model's context is."""
ENOUGH_KV, MOST_KV = 0.2, 0.4
"""Shares of a GPU for keys and values: with less the engine waits, more is not taken."""


def settings(job: MemoryJob, wish: RequestedSetting) -> Iterator[MemorySetting]:
    """What can be chosen."""
    merges: tuple[Merging, ...] = ("copy", "in place", "never") if job.lends else ("copy", "never")
    pauses = (False, True) if job.samples and not job.overlaps else (False,)
    for merge in merges if job.adapters and job.samples else merges[:1]:
        kinds: tuple[Checkpointing, ...] = (wish.checkpointing,) if wish.checkpointing else ("none", "block")
        for checkpointing, park, helpers in product(kinds, pauses, _turns(job)):
            if merge != "in place" or park:
                for tokens in sizes(job, wish):
                    yield MemorySetting(tokens, checkpointing, merge, park, helpers)


def _turns(job: MemoryJob) -> tuple[Helpers, ...]:
    if not job.helpers:
        return ("stay",)
    return ("stay", "swap") if job.overlaps else ("stay", "swap", "leave")


def sizes(job: MemoryJob, wish: RequestedSetting) -> list[int]:
    """Tokens of a micro-batch to try, the largest first; never fewer than the longest sequence has."""
    if wish.tokens:
        return [max(wish.tokens, job.longest)]
    most = BUSY_SMALL if job.shape.parameters < SMALL else BUSY
    least = max(job.longest, min(LEAST, job.shape.context or LEAST))
    return [
        tokens for tokens in (most, 24576, 16384, 12288, 8192, 6144, 4096, 3072, 2048, 1024) if most >= tokens > least
    ] + [least]


def room(job: MemoryJob, setting: MemorySetting, limit: int) -> int:
    """Bytes that are left for keys and values of all models; below zero: what is missing."""
    parts = parts_of(job, setting, 0, 0)
    sampling, learning = sum(p.sampling for p in parts), sum(p.learning for p in parts)
    if not setting.park and job.samples:
        sampling = max(sampling, learning)
    return limit - sampling if limit - learning >= 0 else limit - learning


def _kv_of_a_token(job: MemoryJob) -> int:
    """Bytes of one token's keys and values in all engines."""
    return job.shape.kv_numbers * job.size * job.samples + sum(guest.kv for guest in job.guests)


def least_tokens(job: MemoryJob) -> int:
    """Tokens of the longest sequence, without whose keys and values an engine cannot serve it."""
    return max(job.longest, 2048)


def least_kv(job: MemoryJob) -> int:
    """Bytes of those in all engines."""
    return least_tokens(job) * _kv_of_a_token(job)


def wanted_kv(job: MemoryJob) -> int:
    """Bytes beyond which there is nothing to put into them."""
    return max(job.wanted * _kv_of_a_token(job), least_kv(job))


def cost(job: MemoryJob, setting: MemorySetting, kv: int, limit: int) -> float:
    """How long a step takes, in steps with everything in memory: half of it sampling, half learning, by rule of thumb.

    Computing blocks again is a third more learning; a micro-batch reads all weights; a parked engine captures its
    steps again and fills its pages anew; called adapters sample at half the speed.
    """
    learn = (1 + 1024 / setting.tokens) * (4 / 3 if setting.checkpointing == "block" else 1)
    sample = {"copy": 1.0, "in place": 1.02, "never": 2.0}[setting.merge] + 0.1 * setting.park
    enough = min(wanted_kv(job), ENOUGH_KV * limit)
    scarce = max(0.0, 1 - kv / enough) if job.samples and enough else 0.0
    return learn + (sample * (1 + scarce) if job.samples else 0)


def choose(job: MemoryJob, limit: int, wish: RequestedSetting | None = None) -> MemoryPlan | None:
    """The fastest settings that fit into `limit` bytes, with the rest for keys and values; None: nothing does."""
    fitting = [
        found
        for setting in settings(job, wish or RequestedSetting())
        for found in (_together if setting.helpers == "stay" else _in_turns)(job, setting, limit)
    ]
    return min(fitting, key=lambda found: found[0])[1] if fitting else None


def _together(job: MemoryJob, setting: MemorySetting, limit: int) -> Iterator[tuple[float, MemoryPlan]]:
    """Costs and plans in which all models are always there."""
    left = room(job, setting, limit)
    if left >= least_kv(job):
        most = min(left, wanted_kv(job), max(int(MOST_KV * limit), least_kv(job)))
        yield cost(job, setting, left, limit), _made(job, setting, most, limit)


def _in_turns(job: MemoryJob, setting: MemorySetting, limit: int) -> Iterator[tuple[float, MemoryPlan]]:
    """Costs and plans in which helpers take turns, with keys and values of more or fewer tokens."""
    parts, awake = parts_of(job, setting, 0, 0), not setting.park
    sampling, learning = (limit - sum(getattr(p, phase) for p in parts) for phase in ("sampling", "learning"))
    own = _kv_of_a_token(job.staying)
    for tokens in _halves(max(job.wanted, least_tokens(job)), least_tokens(job)):
        kv = tokens * own
        arena = min(sampling - kv, learning - kv * awake) if setting.helpers == "swap" else sampling - kv
        if arena <= 0 or learning < kv * awake:
            continue
        overlay = laid({helper.name: helper.place(tokens) for helper in job.helpers}, arena)
        if overlay is not None:
            all_kv = kv + tokens * sum(helper.kv for helper in job.helpers)
            swaps = 0.05 + 0.5 * overlay.contended + (0.1 if setting.helpers == "leave" else 0)
            yield cost(job, setting, all_kv, limit) + swaps, _taking_turns(job, setting, tokens, overlay, limit)


def _halves(most: int, least: int) -> Iterator[int]:
    while most > least:
        yield most
        most //= 2
    yield least


def _taking_turns(job: MemoryJob, setting: MemorySetting, tokens: int, overlay: MemoryLayout, limit: int) -> MemoryPlan:
    """The plan with keys and values of so many tokens for every engine; helpers come back from the host."""
    made = _made(job.staying, replace(setting, helpers="stay"), tokens * _kv_of_a_token(job.staying), limit)
    parts = parts_of(job, setting, made.kv_bytes, sum(made.guest_kv.values()), overlay.size)
    host = made.host + sum(helper.weights for helper in job.helpers)
    return replace(made, setting=setting, parts=parts, host=host, overlay=overlay, guests=job.guests)


def smallest(job: MemoryJob, limit: int, wish: RequestedSetting | None = None) -> MemoryPlan:
    """The settings that come nearest to fitting."""
    return min(
        (_least(job, setting, limit) for setting in settings(job, wish or RequestedSetting())),
        key=lambda plan: plan.peak,
    )


def _least(job: MemoryJob, setting: MemorySetting, limit: int) -> MemoryPlan:
    if setting.helpers == "stay":
        return _made(job, setting, least_kv(job), limit)
    tokens = least_tokens(job)
    places = {helper.name: helper.place(tokens) for helper in job.helpers}
    overlay = laid(places, aligned(max(places.values())))
    assert overlay is not None
    return _taking_turns(job, setting, tokens, overlay, limit)


def _made(job: MemoryJob, setting: MemorySetting, kv: int, limit: int) -> MemoryPlan:
    """The plan with `kv` bytes shared among the engines by what a token takes in each."""
    own, each = job.shape.kv_numbers * job.size * job.samples, _kv_of_a_token(job)
    shares = {guest.name: kv * guest.kv // each for guest in job.guests} if each else {}
    policy = kv * own // each if each else 0
    host = job.processes * (4 * job.share + job.state) if job.offload else 0
    if setting.merge == "in place":
        host += job.copy
    parts = parts_of(job, setting, policy, sum(shares.values()))
    return MemoryPlan(setting, policy, shares, parts, limit, host, guests=job.guests)


def unlimited(job: MemoryJob, wish: RequestedSetting) -> MemoryPlan:
    """The plan where nothing is limited (the CPU): what the recipe says, and the engine's own sizes."""
    setting = MemorySetting(wish.tokens or WITHOUT_PLAN, wish.checkpointing or "none")
    without = replace(job, guests=tuple(replace(guest, step=0) for guest in job.guests))
    parts = parts_of(without, setting, PAGES * job.samples, PAGES * len(job.guests))
    return MemoryPlan(setting, 0, {}, tuple(p for p in parts if p.name not in GPU_PARTS), 0, guests=without.guests)
