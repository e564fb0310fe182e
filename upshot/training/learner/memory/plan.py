"""The arithmetic of memory: what a run has on its device at its two peaks, sampling and learning. No torch, no weights.

Bytes, from the sizes of a model. `benchmarks/memory_plan.py` compares them with what a GPU measures. Which settings are
taken: `choice.py`. From a recipe to its plan: `fit.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from upshot.config.recipe import Recipe, TrainConfig
from upshot.serving.swap.layout import MemoryLayout
from upshot.training.learner.memory.shape import SEVEN, ModelShape

Checkpointing = Literal["none", "block"]
Merging = Literal["copy", "in place", "never"]
Helpers = Literal["stay", "swap", "leave"]
"""stay: helper models are always there. swap: they take turns in one arena. leave: that, and the arena is the learner's
while it works."""
LEAN = {"llama", "mistral", "qwen2", "qwen3", "smollm3"}
"""Families whose block the learner and the engine run themselves (engine/llama/block.py)."""
CONTEXT, SLACK = 1 << 30, 0.06
"""Left alone of a GPU: what driver, libraries and compiled kernels take; a share for what lies between tensors, and for
what a prediction is wrong by."""
CHUNK_BYTES = 1 << 29
"""The most that a chunk of logits takes in the learner."""
PROMPT_IDS, ROWS = 16384, 1024
"""Prompt ids that the engine reads in one step on a GPU, and sequences that it extends at once."""
WITHOUT_PLAN, PAGES = 16384, 512 << 20
"""On the CPU: tokens of a micro-batch, and bytes of an engine's keys and values."""
FOUR_BIT = 0.52
"""Bytes of a weight in 4 bits, with its share of the scales."""
PROMPT = 1024
"""Tokens that a prompt is taken to have where nothing says how long one may be."""
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
    """Whether it is a copy of the policy, which shares what is not trained: it never takes turns."""
    pages: int = 0
    """Bytes of keys and values that the recipe gives it, whatever is left."""

    def region(self, tokens: int) -> int:
        """Bytes of its place in an arena, with keys and values of so many tokens; weights begin at round addresses."""
        return self.weights + self.weights // 256 + (1 << 16) + self.pages + tokens * self.kv


@dataclass(frozen=True)
class MemoryJob:
    """A phase of a recipe on a model: what it must have in memory, whatever is chosen."""

    recipe: Recipe
    config: TrainConfig
    """Of the phase."""
    shape: ModelShape
    size: int
    """Bytes of one of the model's numbers."""
    helpers: tuple[HelperModel, ...] = ()
    processes: int = 1
    """Ranks that train together, each on a device of its own."""

    @cached_property
    def samples(self) -> bool:
        """Whether there is an engine on the policy; vLLM has memory of its own."""
        return self.config.samples and self.recipe.model.engine.name == "upshot"

    @property
    def narrow(self) -> bool:
        """Whether the engine samples from a copy of the projections in 8 bits."""
        return self.samples and self.recipe.model.engine.weights == "fp8"

    @cached_property
    def swappable(self) -> tuple[HelperModel, ...]:
        """Models that can be brought in and out: nobody trains them or their copies."""
        return tuple(helper for helper in self.helpers if not helper.copy)

    @cached_property
    def kv(self) -> int:
        """Bytes of one token's keys and values in the policy's engine."""
        size = 1 if self.recipe.model.engine.kv == "fp8" else self.size
        return self.shape.kv_numbers * size * self.samples

    @cached_property
    def least(self) -> int:
        """Tokens of the longest sequence, without whose keys and values an engine cannot serve it."""
        return max(self.recipe.model.max_context, 2048)

    @cached_property
    def wanted(self) -> int:
        """Tokens whose keys and values are of use at once: all replies and futures of a step at their longest."""
        config, episode, futures = self.recipe.train, self.recipe.episode, self.recipe.futures
        replies = min(config.prompts_per_step * config.group_size * futures.leaves, ROWS)
        turns = episode.max_turns + 2 * futures.rounds
        length = self.recipe.model.max_context or PROMPT + turns * episode.max_tokens
        return max(replies * min(length, self.shape.context or length), self.least)

    @cached_property
    def lends(self) -> bool:
        """Whether nobody but engine and learner reads the weights, so that adapters can be merged in place."""
        model = self.recipe.model
        apart = model.quantize == "none" and not model.exact and not self.narrow
        return apart and not any(helper.copy for helper in self.helpers)

    @cached_property
    def trained(self) -> tuple[int, int]:
        """Parameters that are trained, and bytes of one of them."""
        lora = self.recipe.model.lora
        if lora is None:
            return self.shape.parameters, self.size
        return self.shape.adapters(lora.r, lora.targets or SEVEN, lora.kind == "dora"), 4


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
class MemoryPart:
    """One line of the arithmetic, in bytes."""

    name: str
    sampling: int
    learning: int
    why: str = ""
    host: int = 0
    """Of the host's memory."""


@dataclass(frozen=True)
class MemoryPlan:
    """Settings and what they need."""

    setting: MemorySetting
    kv_bytes: int
    """For the policy's keys and values; 0: as the engine finds right."""
    helper_kv: dict[str, int]
    """For those of each helper that does not take turns."""
    parts: tuple[MemoryPart, ...]
    limit: int
    """Bytes to use; 0: not known."""
    layout: MemoryLayout | None = None
    """The places of helper models that take turns."""
    helpers: tuple[HelperModel, ...] = ()

    @property
    def sampling(self) -> int:
        """Bytes while the engine samples."""
        return sum(part.sampling for part in self.parts)

    @property
    def learning(self) -> int:
        """Bytes while the learner works."""
        return sum(part.learning for part in self.parts)

    @property
    def host(self) -> int:
        """Bytes on the host beside the program."""
        return sum(part.host for part in self.parts)

    @property
    def peak(self) -> int:
        """The most that is there at once."""
        return max(self.sampling, self.learning)


def usable(total: int) -> int:
    """Bytes of a device that can be planned with."""
    return int(max(total - CONTEXT, 0) * (1 - SLACK))


# What the learner's forward keeps for its backward, and what a step of the engine needs: numbers to calibrate.


def layer_bytes(job: MemoryJob) -> int:
    """Bytes that a token keeps in one layer."""
    shape, size, model, lora = job.shape, job.size, job.recipe.model, job.recipe.model.lora
    heads_normed = shape.family == "qwen3"
    ranks = lora.r * len(set(lora.targets or SEVEN) & set(SEVEN)) if lora else 0
    h, a, kv, m = shape.hidden, shape.queries, shape.keys, shape.mlp
    # The residual before each half, queries, keys and values, attention's result, gate and up; its log-sums in float32.
    numbers = 2 * h + 2 * a + 2 * kv + 2 * m + ranks + (a + 2 * kv if heads_normed else 0)
    total = numbers * size + 4 * shape.heads
    if shape.family not in LEAN:  # norms and their float32 inputs, unrotated queries and keys, gated, ungated parts
        return total + size * (2 * h + a + 2 * kv + 2 * m) + 8 * h
    noise = lora is not None and lora.dropout > 0 and job.config.method == "sft"
    if lora is not None and (model.quantize != "none" or lora.kind == "dora" or noise):
        # Adapters are called as modules of peft: inputs of the projections once more, in float32.
        return total + 4 * (5 * h + a + m) + size * (2 * h + m)
    return total


def activations(job: MemoryJob, setting: MemorySetting) -> tuple[int, int]:
    """Bytes that a micro-batch's forward leaves for its backward, and those beside that at the backward's highest.

    The highest is in the head (chunks of logits, the last and the next; the head's gradient, summed in float32 where
    there are several) or in one layer, which is there whole where blocks are computed again.
    """
    shape, size, tokens, again = job.shape, job.size, setting.tokens, setting.checkpointing == "block"
    layer = layer_bytes(job)
    ends = 4 * shape.hidden * size  # embedding, last norm and the gradients of both
    forward = tokens * (shape.layers * (shape.hidden * size if again else layer) + ends)
    logits = tokens * shape.vocab * size
    head = 2 * min(CHUNK_BYTES, logits)
    if job.recipe.model.lora is None:
        head += shape.count("lm_head") * (size + 4 * (logits > CHUNK_BYTES))
    inside = tokens * ((3 * shape.mlp + 3 * shape.hidden) * size + (layer if again else 0))
    return forward, max(head, inside)


def optimizer_bytes(job: MemoryJob) -> tuple[int, int, int]:
    """Bytes of the optimizer's state, of summed gradients, and of one micro-batch's gradients, for one process.

    The state is float32 masters where the weights are none, and two moments. Sums are float32. A micro-batch's own
    gradients take memory only where they are not added up where they arise.
    """
    count, size = job.trained
    offload, small = job.config.optimizer.offload, job.config.optimizer.name == "adamw-8bit"
    share, passing = count, size * count if offload or size < 4 else 0
    if job.processes > 1:  # whole matrices belong to one process (with adapters: small ones)
        width = 1 if job.recipe.model.lora else max(job.shape.vocab, job.shape.mlp)
        share = max(count // job.processes, width * job.shape.hidden)
        # Where gradients arise they are of all parameters, and go to others one by one.
        passing = size * count + 4 * width * job.shape.hidden
    state = int(share * ((2 * 1.02 if small else 8) + (4 if offload or size < 4 else 0)))
    return state, 4 * share, passing


def step_bytes(shape: ModelShape, size: int) -> tuple[int, int]:
    """Bytes that one step of an engine needs for the prompt ids it reads at once, and those that captured steps hold.

    Captured steps hold what the largest of them needs, and the logits that all of them share.
    """
    step = PROMPT_IDS * (3 * shape.hidden + 3 * shape.queries + 2 * shape.keys + 2 * shape.mlp) * size
    return step, step + ROWS * shape.vocab * size


def parts_of(job: MemoryJob, setting: MemorySetting, kv: int, helper_kv: int, arena: int = 0) -> tuple[MemoryPart, ...]:
    """The arithmetic of one setting, with so many bytes for keys and values of the policy and of helpers that stay.

    Keys and values of helpers that take turns are in the arena.
    """
    awake = not setting.park
    step, graphs = step_bytes(job.shape, job.size) if job.samples else (0, 0)
    turns = job.swappable if setting.helpers != "stay" else ()
    stay = [helper for helper in job.helpers if helper not in turns]
    others = helper_kv + sum(helper.weights + helper.step + helper.pages for helper in stay)
    steps, beside = sum(helper.step for helper in turns), setting.helpers != "leave"
    taken = f"{', '.join(helper.name for helper in turns)} take turns"
    lines = [
        *_weights(job, setting),
        *_learner(job, setting),
        MemoryPart("keys and values", kv, kv * awake, "the engine's pages"),
        MemoryPart("captured steps", graphs, graphs * awake, "CUDA graphs"),
        MemoryPart("engine's step", step, 0, f"{PROMPT_IDS} prompt ids"),
        MemoryPart("other models", others, others, ", ".join(helper.name for helper in stay)),
        MemoryPart("helpers' arena", arena, arena * beside, taken, sum(helper.weights for helper in turns)),
        MemoryPart("helpers' steps", steps, steps * beside, "CUDA graphs and what a step needs"),
    ]
    return tuple(part for part in lines if part.sampling or part.learning or part.host)


def _weights(job: MemoryJob, setting: MemorySetting) -> Iterator[MemoryPart]:
    """The policy's weights and adapters, and what its sampler has of them a second time."""
    shape, model = job.shape, job.recipe.model
    weights = shape.parameters * job.size
    weights -= int(shape.projections * (job.size - FOUR_BIT)) if model.quantize == "4bit" else 0
    yield MemoryPart("weights", weights, weights, f"{in_words(shape.parameters)} parameters")
    if job.narrow:
        copy = shape.projections
        yield MemoryPart("weights in 8 bits", copy, copy * (not setting.park), "projections, to sample")
    if model.lora is None:
        return
    count, size = job.trained
    yield MemoryPart("adapters", count * size, count * size, f"{in_words(count)} parameters in float32")
    targets = [name for name in model.lora.targets or SEVEN if not (job.narrow and name in SEVEN)]
    merged = 0 if model.exact else shape.count_merged(targets) * job.size
    copy = merged if setting.merge == "copy" and job.samples else 0
    saved = merged if setting.merge == "in place" else 0  # the weights without adapters, while those are merged
    yield MemoryPart("merged adapters", copy, copy * (not setting.park), "a copy of what they sit on, to sample", saved)


def _learner(job: MemoryJob, setting: MemorySetting) -> Iterator[MemoryPart]:
    """What is there beside the weights to train them."""
    config, (count, size) = job.config, job.trained
    state, sums, passing = optimizer_bytes(job)
    away = job.processes * (sums + state) if config.optimizer.offload else 0
    state, sums = (0, 0) if away else (state, sums)
    forward, backward = activations(job, setting)
    sums += max(0, passing - forward - backward)  # a micro-batch's own gradients grow while its activations go
    reference = count * size if config.kl.weight or config.method in ("dpo", "online-dpo") else 0
    masters = "float32 masters and " if size < 4 else ""
    moments = "8-bit" if config.optimizer.name == "adamw-8bit" else "float32"
    again = "each block computed again" if setting.checkpointing == "block" else "nothing computed again"
    yield MemoryPart("optimizer", state, state, f"{masters}two {moments} moments", away)
    yield MemoryPart("reference", reference, reference, "the trained weights as they were")
    yield MemoryPart("gradients", 0, sums, "float32")
    yield MemoryPart("activations", 0, forward, f"{setting.tokens} tokens, {again}")
    yield MemoryPart("backward", 0, backward, "logits in chunks, or one layer")


def in_words(number: int) -> str:
    """A number of parameters in words."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
