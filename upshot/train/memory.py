"""Memory by plan: what a run needs at its two peaks (sampling, learning), and which settings fit. No torch, no weights.

Arithmetic on a model's config.json. Of what fits the cheapest in time is taken (`cost`): small micro-batches, blocks
computed again on the way back, an engine that is parked while the learner works, adapters that are called and few keys
and values each cost something. What is left of the memory is for keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from upshot.pool.overlay import Overlay, aligned, laid
from upshot.train import activations
from upshot.train.model_shape import ModelShape

Checkpointing = Literal["none", "block"]
Merging = Literal["copy", "in place", "never"]
Helpers = Literal["stay", "swap", "leave"]
"""stay: helper models are always there. swap: they take turns in one arena. leave: that, and the arena is the learner's
while it works."""
CONTEXT = 1 << 30
"""Of a GPU's memory: what the driver, the libraries and compiled kernels take."""
SLACK = 0.06
"""Share of a GPU that is left alone: what lies between tensors, and what a prediction is wrong by."""
BUSY, BUSY_SMALL, SMALL = 8192, 32768, 500_000_000
"""Tokens of a micro-batch that keep a GPU busy; of models with fewer parameters than the last."""
LEAST = 1024
"""No micro-batch is planned smaller, unless the model's context is."""
ENOUGH_KV, MOST_KV = 0.2, 0.4
"""Shares of a GPU for keys and values: with less the engine waits, more is not taken."""
WITHOUT_PLAN, PAGES = 16384, 512 << 20
"""On the CPU: tokens of a micro-batch, and bytes of an engine's keys and values."""
GPU_PARTS = ("captured steps", "engine's step")
"""Parts of the arithmetic that there are on a GPU only."""


@dataclass(frozen=True)
class Guest:
    """Another model on the same device: a helper, or a frozen copy of the policy."""

    name: str
    weights: int
    """Bytes that it does not share with the policy."""
    step: int
    """Bytes of its engine's steps."""
    kv: int
    """Bytes of one token's keys and values."""
    copy: bool = False
    """Whether it is a copy of the policy, which shares what is not trained."""
    pages: int = 0
    """Bytes of keys and values that the recipe gives it, whatever is left."""

    def place(self, tokens: int) -> int:
        """Bytes of its place in an arena, with keys and values of so many tokens; weights begin at round addresses."""
        return self.weights + self.weights // 256 + (1 << 16) + self.pages + tokens * self.kv


@dataclass(frozen=True)
class Job:
    """What a run must have in memory, whatever is chosen."""

    shape: ModelShape
    size: int
    """Bytes of one of the model's numbers."""
    weights: int
    """Bytes."""
    trained: int
    """Parameters."""
    trained_size: int
    """Bytes of one of them."""
    adapters: bool = False
    copy: int = 0
    """Bytes of a merged copy."""
    ranks: int = 0
    """Of the adapters of one layer together."""
    block: activations.Block = "lean"
    small_state: bool = False
    """Whether the optimizer's moments have 8 bits."""
    offload: bool = False
    """Whether the optimizer is on the host."""
    reference: bool = False
    """Whether the trained weights are kept as they were."""
    samples: bool = True
    longest: int = 0
    """Tokens of the longest sequence; 0: not known."""
    wanted: int = 0
    """Tokens whose keys and values are of use at once."""
    lends: bool = True
    """Whether nobody but engine and learner reads the weights, so that adapters can be merged in place."""
    overlaps: bool = False
    """Whether the engine samples while the learner works: then it is not parked, and is lent nothing."""
    guests: tuple[Guest, ...] = ()
    processes: int = 1
    """Ranks that train together, each on a device of its own."""

    @property
    def helpers(self) -> tuple[Guest, ...]:
        """Models that can be brought in and out: nobody trains them or their copies."""
        return tuple(guest for guest in self.guests if not guest.copy)

    @property
    def staying(self) -> Job:
        """The job without them."""
        return replace(self, guests=tuple(guest for guest in self.guests if guest.copy))

    @property
    def largest(self) -> int:
        """Parameters of the largest matrix that is trained, with adapters about: each belongs to one process."""
        return self.shape.hidden if self.adapters else max(self.shape.vocab, self.shape.mlp) * self.shape.hidden

    @property
    def share(self) -> int:
        """Parameters that one process sums the gradients of and updates."""
        return self.trained if self.processes == 1 else max(self.trained // self.processes, self.largest)

    @property
    def gradients(self) -> int:
        """Bytes of what micro-batches add up to, in float32, on the device."""
        return 0 if self.offload else 4 * self.share

    @property
    def passing(self) -> int:
        """Bytes of one micro-batch's gradients, where they are not added up where they arise."""
        if self.processes > 1:  # where they arise they are of all parameters, and go to others one by one
            return self.trained_size * self.trained + 4 * self.largest
        return self.trained_size * self.trained if self.offload or self.trained_size < 4 else 0

    @property
    def state(self) -> int:
        """Bytes of the optimizer: float32 masters where the weights are none, and two moments."""
        moments = 2 * 1.02 if self.small_state else 8
        return int(self.share * (moments + (4 if self.offload or self.trained_size < 4 else 0)))


@dataclass(frozen=True)
class Setting:
    """What can be chosen."""

    tokens: int
    """Of a micro-batch."""
    checkpointing: Checkpointing = "none"
    merge: Merging = "copy"
    park: bool = False
    """Whether the engine gives its memory back while the learner works."""
    helpers: Helpers = "stay"


@dataclass(frozen=True)
class Wish:
    """What the recipe says already; empty: it is to be chosen."""

    tokens: int = 0
    checkpointing: Checkpointing | None = None


@dataclass(frozen=True)
class Part:
    """One line of the arithmetic, in bytes."""

    name: str
    sampling: int
    learning: int
    why: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """Settings and what they need."""

    setting: Setting
    kv_bytes: int
    """For the policy's keys and values; 0: as the engine finds right."""
    guest_kv: dict[str, int]
    """For those of each guest."""
    parts: tuple[Part, ...]
    limit: int
    """Bytes to use; 0: not known."""
    host: int = 0
    """Bytes on the host beside the program."""
    overlay: Overlay | None = None
    """The places of helper models that take turns."""
    guests: tuple[Guest, ...] = ()

    @property
    def peak(self) -> int:
        """The most that is there at once."""
        return max(sum(p.sampling for p in self.parts), sum(p.learning for p in self.parts))


def usable(total: int) -> int:
    """Bytes of a device that can be planned with."""
    return int(max(total - CONTEXT, 0) * (1 - SLACK))


def settings(job: Job, wish: Wish) -> Iterator[Setting]:
    """What can be chosen."""
    merges: tuple[Merging, ...] = ("copy", "in place", "never") if job.lends else ("copy", "never")
    pauses = (False, True) if job.samples and not job.overlaps else (False,)
    for merge in merges if job.adapters and job.samples else merges[:1]:
        kinds: tuple[Checkpointing, ...] = (wish.checkpointing,) if wish.checkpointing else ("none", "block")
        for checkpointing, park, helpers in product(kinds, pauses, _turns(job)):
            if merge != "in place" or park:
                for tokens in sizes(job, wish):
                    yield Setting(tokens, checkpointing, merge, park, helpers)


def _turns(job: Job) -> tuple[Helpers, ...]:
    if not job.helpers:
        return ("stay",)
    return ("stay", "swap") if job.overlaps else ("stay", "swap", "leave")


def sizes(job: Job, wish: Wish) -> list[int]:
    """Tokens of a micro-batch to try, the largest first; never fewer than the longest sequence has."""
    if wish.tokens:
        return [max(wish.tokens, job.longest)]
    most = BUSY_SMALL if job.shape.parameters < SMALL else BUSY
    least = max(job.longest, min(LEAST, job.shape.context or LEAST))
    return [
        tokens for tokens in (most, 24576, 16384, 12288, 8192, 6144, 4096, 3072, 2048, 1024) if most >= tokens > least
    ] + [least]


def parts_of(job: Job, setting: Setting, kv: int, guest_kv: int, arena: int = 0) -> tuple[Part, ...]:
    """The arithmetic of one setting, with so many bytes for keys and values of the policy and of its guests.

    Of guests that take turns keys and values are in the arena.
    """
    helpers: tuple[Guest, ...] = ()
    if setting.helpers != "stay":
        job, helpers = job.staying, job.helpers
    beside = 0 if setting.helpers == "leave" else 1
    steps = sum(helper.step for helper in helpers)
    shape, size, tokens = job.shape, job.size, setting.tokens
    awake = 0 if setting.park else 1
    copy = job.copy if setting.merge == "copy" and job.samples else 0
    step, graphs = (activations.sampling(shape, size), activations.graphs(shape, size)) if job.samples else (0, 0)
    how = (shape, tokens, job.block, setting.checkpointing == "block", job.ranks, size)
    forward, backward = activations.held(*how), activations.at_work(*how, all_trained=not job.adapters)
    # A micro-batch's own gradients grow while its activations go.
    behind = max(0, job.passing - forward - backward)
    own = job.trained * job.trained_size if job.adapters else 0
    state = 0 if job.offload else job.state
    kept = job.trained * job.trained_size if job.reference else 0
    others = sum(guest.weights + guest.step + guest.pages for guest in job.guests)
    found = [
        Part("weights", job.weights, job.weights, f"{counted(shape.parameters)} parameters"),
        Part("adapters", own, own, f"{counted(job.trained)} parameters in float32"),
        Part("merged adapters", copy, copy * awake, "a copy of the weights they sit on, for the sampler"),
        Part("optimizer", state, state, _state(job)),
        Part("reference", kept, kept, "the trained weights as they were"),
        Part("gradients", 0, job.gradients + behind, "float32"),
        Part("activations", 0, forward, f"{tokens} tokens, {_checkpointing(setting)}"),
        Part("backward", 0, backward, "logits in chunks, or one layer"),
        Part("keys and values", kv, kv * awake, "the engine's pages"),
        Part("captured steps", graphs, graphs * awake, "CUDA graphs"),
        Part("engine's step", step, 0, f"{activations.PROMPT_IDS} prompt ids"),
        Part("other models", others + guest_kv, others + guest_kv, ", ".join(guest.name for guest in job.guests)),
        Part("helpers' arena", arena, arena * beside, f"{', '.join(helper.name for helper in helpers)} take turns"),
        Part("helpers' steps", steps, steps * beside, "CUDA graphs and what a step needs"),
    ]
    return tuple(part for part in found if part.sampling or part.learning)


def counted(number: int) -> str:
    """A number of parameters in words."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _state(job: Job) -> str:
    masters = "float32 masters and " if job.trained_size < 4 else ""
    return f"{masters}two {'8-bit' if job.small_state else 'float32'} moments"


def _checkpointing(setting: Setting) -> str:
    return "each block computed again" if setting.checkpointing == "block" else "nothing computed again"


def room(job: Job, setting: Setting, limit: int) -> int:
    """Bytes that are left for keys and values of all models; below zero: what is missing."""
    parts = parts_of(job, setting, 0, 0)
    sampling, learning = sum(p.sampling for p in parts), sum(p.learning for p in parts)
    if not setting.park and job.samples:
        sampling = max(sampling, learning)
    return limit - sampling if limit - learning >= 0 else limit - learning


def _kv_of_a_token(job: Job) -> int:
    """Bytes of one token's keys and values in all engines."""
    return job.shape.kv_numbers * job.size * job.samples + sum(guest.kv for guest in job.guests)


def least_tokens(job: Job) -> int:
    """Tokens of the longest sequence, without whose keys and values an engine cannot serve it."""
    return max(job.longest, 2048)


def least_kv(job: Job) -> int:
    """Bytes of those in all engines."""
    return least_tokens(job) * _kv_of_a_token(job)


def wanted_kv(job: Job) -> int:
    """Bytes beyond which there is nothing to put into them."""
    return max(job.wanted * _kv_of_a_token(job), least_kv(job))


def cost(job: Job, setting: Setting, kv: int, limit: int) -> float:
    """How long a step takes, in steps with everything in memory: half of it sampling, half learning, by rule of thumb.

    Computing blocks again is a third more learning; a micro-batch reads all weights; a parked engine captures its
    steps again and fills its pages anew; called adapters sample at half the speed.
    """
    learn = (1 + 1024 / setting.tokens) * (4 / 3 if setting.checkpointing == "block" else 1)
    sample = {"copy": 1.0, "in place": 1.02, "never": 2.0}[setting.merge] + 0.1 * setting.park
    enough = min(wanted_kv(job), ENOUGH_KV * limit)
    scarce = max(0.0, 1 - kv / enough) if job.samples and enough else 0.0
    return learn + (sample * (1 + scarce) if job.samples else 0)


def choose(job: Job, limit: int, wish: Wish | None = None) -> MemoryPlan | None:
    """The fastest settings that fit into `limit` bytes, with the rest for keys and values; None: nothing does."""
    fitting = [
        found
        for setting in settings(job, wish or Wish())
        for found in (_together if setting.helpers == "stay" else _in_turns)(job, setting, limit)
    ]
    return min(fitting, key=lambda found: found[0])[1] if fitting else None


def _together(job: Job, setting: Setting, limit: int) -> Iterator[tuple[float, MemoryPlan]]:
    """Costs and plans in which all models are always there."""
    left = room(job, setting, limit)
    if left >= least_kv(job):
        most = min(left, wanted_kv(job), max(int(MOST_KV * limit), least_kv(job)))
        yield cost(job, setting, left, limit), _made(job, setting, most, limit)


def _in_turns(job: Job, setting: Setting, limit: int) -> Iterator[tuple[float, MemoryPlan]]:
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


def _taking_turns(job: Job, setting: Setting, tokens: int, overlay: Overlay, limit: int) -> MemoryPlan:
    """The plan with keys and values of so many tokens for every engine; helpers come back from the host."""
    made = _made(job.staying, replace(setting, helpers="stay"), tokens * _kv_of_a_token(job.staying), limit)
    parts = parts_of(job, setting, made.kv_bytes, sum(made.guest_kv.values()), overlay.size)
    host = made.host + sum(helper.weights for helper in job.helpers)
    return replace(made, setting=setting, parts=parts, host=host, overlay=overlay, guests=job.guests)


def smallest(job: Job, limit: int, wish: Wish | None = None) -> MemoryPlan:
    """The settings that come nearest to fitting."""
    return min((_least(job, setting, limit) for setting in settings(job, wish or Wish())), key=lambda plan: plan.peak)


def _least(job: Job, setting: Setting, limit: int) -> MemoryPlan:
    if setting.helpers == "stay":
        return _made(job, setting, least_kv(job), limit)
    tokens = least_tokens(job)
    places = {helper.name: helper.place(tokens) for helper in job.helpers}
    overlay = laid(places, aligned(max(places.values())))
    assert overlay is not None
    return _taking_turns(job, setting, tokens, overlay, limit)


def _made(job: Job, setting: Setting, kv: int, limit: int) -> MemoryPlan:
    """The plan with `kv` bytes shared among the engines by what a token takes in each."""
    own, each = job.shape.kv_numbers * job.size * job.samples, _kv_of_a_token(job)
    shares = {guest.name: kv * guest.kv // each for guest in job.guests} if each else {}
    policy = kv * own // each if each else 0
    host = job.processes * (4 * job.share + job.state) if job.offload else 0
    if setting.merge == "in place":
        host += job.copy
    parts = parts_of(job, setting, policy, sum(shares.values()))
    return MemoryPlan(setting, policy, shares, parts, limit, host, guests=job.guests)


def unlimited(job: Job, wish: Wish) -> MemoryPlan:
    """The plan where nothing is limited (the CPU): what the recipe says, and the engine's own sizes."""
    setting = Setting(wish.tokens or WITHOUT_PLAN, wish.checkpointing or "none")
    without = replace(job, guests=tuple(replace(guest, step=0) for guest in job.guests))
    parts = parts_of(without, setting, PAGES * job.samples, PAGES * len(job.guests))
    return MemoryPlan(setting, 0, {}, tuple(p for p in parts if p.name not in GPU_PARTS), 0, guests=without.guests)
