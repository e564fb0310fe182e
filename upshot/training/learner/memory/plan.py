"""Memory by plan: what a run needs at its two peaks (sampling, learning). No torch, no weights.

Arithmetic on a model's config.json. Which settings are chosen: `memory_choice.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from upshot.serving.swap.overlay import MemoryLayout
from upshot.training.learner.memory import activations
from upshot.training.learner.memory.model_shape import ModelShape

Checkpointing = Literal["none", "block"]
Merging = Literal["copy", "in place", "never"]
Helpers = Literal["stay", "swap", "leave"]
"""stay: helper models are always there. swap: they take turns in one arena. leave: that, and the arena is the learner's
while it works."""
CONTEXT = 1 << 30
"""Of a GPU's memory: what the driver, the libraries and compiled kernels take."""
SLACK = 0.06
"""Share of a GPU that is left alone: what lies between tensors, and what a prediction is wrong by."""
WITHOUT_PLAN, PAGES = 16384, 512 << 20
"""On the CPU: tokens of a micro-batch, and bytes of an engine's keys and values."""
GPU_PARTS = ("captured steps", "engine's step")
"""Parts of the arithmetic that there are on a GPU only."""


@dataclass(frozen=True)
class HelperModel:
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
class MemoryJob:
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
    guests: tuple[HelperModel, ...] = ()
    processes: int = 1
    """Ranks that train together, each on a device of its own."""

    @property
    def helpers(self) -> tuple[HelperModel, ...]:
        """Models that can be brought in and out: nobody trains them or their copies."""
        return tuple(guest for guest in self.guests if not guest.copy)

    @property
    def staying(self) -> MemoryJob:
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
        turn_snapshots = 2 * 1.02 if self.small_state else 8
        return int(self.share * (turn_snapshots + (4 if self.offload or self.trained_size < 4 else 0)))


@dataclass(frozen=True)
class MemorySetting:
    """What can be chosen."""

    tokens: int
    """Of a micro-batch."""
    checkpointing: Checkpointing = "none"
    merge: Merging = "copy"
    park: bool = False
    """Whether the engine gives its memory back while the learner works."""
    helpers: Helpers = "stay"


@dataclass(frozen=True)
class RequestedSetting:
    """What the recipe says already; empty: it is to be chosen."""

    tokens: int = 0
    checkpointing: Checkpointing | None = None


@dataclass(frozen=True)
class MemoryPart:
    """One line of the arithmetic, in bytes."""

    name: str
    sampling: int
    learning: int
    why: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """Settings and what they need."""

    setting: MemorySetting
    kv_bytes: int
    """For the policy's keys and values; 0: as the engine finds right."""
    guest_kv: dict[str, int]
    """For those of each guest."""
    parts: tuple[MemoryPart, ...]
    limit: int
    """Bytes to use; 0: not known."""
    host: int = 0
    """Bytes on the host beside the program."""
    overlay: MemoryLayout | None = None
    """The places of helper models that take turns."""
    guests: tuple[HelperModel, ...] = ()

    @property
    def peak(self) -> int:
        """The most that is there at once."""
        return max(sum(p.sampling for p in self.parts), sum(p.learning for p in self.parts))


def usable(total: int) -> int:
    """Bytes of a device that can be planned with."""
    return int(max(total - CONTEXT, 0) * (1 - SLACK))


def parts_of(job: MemoryJob, setting: MemorySetting, kv: int, guest_kv: int, arena: int = 0) -> tuple[MemoryPart, ...]:
    """The arithmetic of one setting, with so many bytes for keys and values of the policy and of its guests.

    Of guests that take turns keys and values are in the arena.
    """
    helpers: tuple[HelperModel, ...] = ()
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
        MemoryPart("weights", job.weights, job.weights, f"{counted(shape.parameters)} parameters"),
        MemoryPart("adapters", own, own, f"{counted(job.trained)} parameters in float32"),
        MemoryPart("merged adapters", copy, copy * awake, "a copy of the weights they sit on, for the sampler"),
        MemoryPart("optimizer", state, state, _state(job)),
        MemoryPart("reference", kept, kept, "the trained weights as they were"),
        MemoryPart("gradients", 0, job.gradients + behind, "float32"),
        MemoryPart("activations", 0, forward, f"{tokens} tokens, {_checkpointing(setting)}"),
        MemoryPart("backward", 0, backward, "logits in chunks, or one layer"),
        MemoryPart("keys and values", kv, kv * awake, "the engine's pages"),
        MemoryPart("captured steps", graphs, graphs * awake, "CUDA graphs"),
        MemoryPart("engine's step", step, 0, f"{activations.PROMPT_IDS} prompt ids"),
        MemoryPart("other models", others + guest_kv, others + guest_kv, ", ".join(guest.name for guest in job.guests)),
        MemoryPart(
            "helpers' arena", arena, arena * beside, f"{', '.join(helper.name for helper in helpers)} take turns"
        ),
        MemoryPart("helpers' steps", steps, steps * beside, "CUDA graphs and what a step needs"),
    ]
    return tuple(part for part in found if part.sampling or part.learning)


def counted(number: int) -> str:
    """A number of parameters in words."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _state(job: MemoryJob) -> str:
    masters = "float32 masters and " if job.trained_size < 4 else ""
    return f"{masters}two {'8-bit' if job.small_state else 'float32'} moments"


def _checkpointing(setting: MemorySetting) -> str:
    return "each block computed again" if setting.checkpointing == "block" else "nothing computed again"
