"""The arithmetic of memory: what a run has on its device at its two peaks, sampling and learning. No weights.

The constants were calibrated on GPU runs; `benchmarks/memory_plan.py` compares predictions with measured peaks. Which
settings are taken: `choice.py`. From a recipe to its plan: `fit.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from upshot.config.method import method_of
from upshot.config.recipe import Recipe, TrainConfig
from upshot.engine.llama.merged import Merging
from upshot.serving.swap.layout import MemoryLayout
from upshot.training.learner.forward.lean import Checkpointing
from upshot.training.learner.memory.shape import ModelShape

Helpers = Literal["stay", "swap", "leave"]
"""stay: helper models are always there. swap: they take turns in one arena. leave: that, and the arena is the learner's
while it works."""
CONTEXT, SLACK = 1 << 30, 0.06
"""Left alone of a GPU: what driver, libraries and compiled kernels take; a share for gaps between tensors and for the
error of a prediction."""
CHUNK_BYTES = 1 << 29
"""The most that a chunk of logits takes in the learner."""
PROMPT_IDS, ROWS = 16384, 1024
"""Prompt ids that the engine reads in one step on a GPU, and sequences that it extends at once."""
FOUR_BIT = 0.52
"""Bytes of a weight in 4 bits, with its share of the scales."""
PROMPT = 1024
"""Tokens assumed for a prompt where nothing limits its length."""


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
        """Bytes of its place in an arena, with keys and values of `tokens` tokens; weights begin at round addresses."""
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
    measured: int = 0
    """Bytes that a token of a micro-batch was seen to keep for the backward on this device; 0: they are computed."""

    @cached_property
    def samples(self) -> bool:
        """Whether there is an engine on the policy; vLLM has memory of its own."""
        return self.config.samples and self.recipe.model.engine.name == "upshot"

    @cached_property
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
        return self.shape.kv_numbers * (1 if self.recipe.model.engine.kv == "fp8" else self.size) * self.samples

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence that can come to be trained; 0: only the data says."""
        ahead = 2 * self.recipe.futures.rounds * (self.recipe.credit.by == "tree")
        return self.recipe.model.max_context or self._length(ahead) * self.config.samples

    @cached_property
    def least(self) -> int:
        """Tokens whose keys and values an engine needs to serve the longest sequence."""
        return max(self.longest, 2048)

    @cached_property
    def wanted(self) -> int:
        """Tokens whose keys and values are of use at once: all replies and futures of a step at their longest."""
        config, futures = self.recipe.train, self.recipe.futures
        replies = min(config.prompts_per_step * config.group_size * futures.leaves, ROWS)
        return max(replies * (self.recipe.model.max_context or self._length(2 * futures.rounds)), self.least)

    def _length(self, more: int) -> int:
        """Tokens of a prompt with all turns of an episode, and `more` turns, at their longest."""
        length = PROMPT + (self.recipe.episode.max_turns + more) * self.recipe.episode.max_tokens
        return min(length, self.shape.context or length)

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
        return (self.shape.parameters, self.size) if lora is None else (sum(self.shape.adapters(lora)), 4)

    @cached_property
    def merged(self) -> int:
        """Bytes of what the engine has a second time where adapters are merged."""
        model = self.recipe.model
        return 0 if model.lora is None or model.exact else self.shape.merged(model.lora, self.narrow) * self.size

    @cached_property
    def called(self) -> bool:
        """Whether adapters are called as modules of peft, not computed in the learner's own products."""
        model, lora = self.recipe.model, self.recipe.model.lora
        noise = draws_dropout(self.recipe, self.config)
        return lora is not None and (model.quantize != "none" or lora.kind == "dora" or noise)

    @property
    def thin(self) -> bool:
        """Whether the learner can compute the way up of every MLP again, and nothing else."""
        return self.shape.lean and not self.called and not self.recipe.model.exact

    @cached_property
    def kept(self) -> int:
        """Bytes that a token keeps in all layers where nothing is computed again."""
        computed = layer_bytes(self) * self.shape.layers
        # For the learner's own block the sum was compared with GPUs: a measurement may find more, not less.
        return max(self.measured, computed) if self.shape.lean or not self.measured else self.measured


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
    """For the policy's keys and values; 0: the engine decides."""
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


def draws_dropout(recipe: Recipe, config: TrainConfig) -> bool:
    """Whether adapters are learned with dropout in a phase."""
    lora = recipe.model.lora
    return lora is not None and lora.dropout > 0 and method_of(config.method).dropout


def usable(total: int) -> int:
    """Bytes of a device that can be planned with."""
    return int(max(total - CONTEXT, 0) * (1 - SLACK))


def layer_bytes(job: MemoryJob) -> int:
    """Bytes that a token keeps in one layer (`forward/lean.py` lists them)."""
    shape, size, lora = job.shape, job.size, job.recipe.model.lora
    ranks = lora.r * len(shape.adapters(lora)) // shape.layers if lora else 0
    h, a, kv, m = shape.hidden, shape.queries, shape.keys, shape.mlp
    # The residual before each half, queries, keys and values, attention's result, gate and up; its log-sums in float32.
    total = (2 * h + 2 * a + 2 * kv + 2 * m + ranks + shape.norms) * size + 4 * shape.heads
    if not shape.lean:
        # Norms and their float32 inputs, unrotated queries and keys, gated and ungated parts; rows by expert.
        return total + size * (2 * h + a + 2 * kv + 2 * m + 2 * h * shape.experts) + 8 * h
    if job.called:
        # Inputs of the projections once more, in float32.
        return total + 4 * (5 * h + a + m) + size * (2 * h + m)
    return total


def activations(job: MemoryJob, setting: MemorySetting) -> tuple[int, int]:
    """Bytes that a micro-batch's forward leaves for its backward, and those beside that at the backward's highest.

    The highest is in the head (chunks of logits, the last and the next; the head's gradient, summed in float32 where
    there are several) or in one layer, which is there whole where blocks are computed again.
    """
    shape, size, tokens = job.shape, job.size, setting.tokens
    way_up = 2 * shape.mlp * size
    again = {"none": 0, "mlp": way_up, "block": job.kept // shape.layers}[setting.checkpointing]
    kept = shape.layers * shape.hidden * size if setting.checkpointing == "block" else job.kept - shape.layers * again
    ends = 4 * shape.hidden * size  # embedding, last norm and the gradients of both
    forward = tokens * (kept + ends)
    logits = tokens * shape.vocab * size
    head = 2 * min(CHUNK_BYTES, logits)
    if job.recipe.model.lora is None:
        head += shape.vocab * shape.hidden * (size + 4 * (logits > CHUNK_BYTES))
    inside = tokens * ((3 * shape.mlp + 3 * shape.hidden) * size + again)
    return forward, max(head, inside)


def optimizer_bytes(job: MemoryJob) -> tuple[int, int, int]:
    """Bytes of the optimizer's state, of summed gradients, and of one micro-batch's gradients, for one process.

    The state is float32 masters where the weights are narrower, and two moments. Sums are float32. A micro-batch's own
    gradients take memory only where they are not added up where they arise.
    """
    count, size = job.trained
    offload, small = job.config.optimizer.offload, job.config.optimizer.name == "adamw-8bit"
    share, passing = count, size * count if offload or size < 4 else 0
    if job.processes > 1:  # whole matrices belong to one process (with adapters: small ones)
        matrices = (rows * columns for rows, columns in (*job.shape.linear.values(), *job.shape.ends.values()))
        largest = job.shape.hidden if job.recipe.model.lora else max(matrices)
        share = max(count // job.processes, largest)
        # Where gradients arise they are of all parameters, and go to others one by one.
        passing = size * count + 4 * largest
    state = int(share * ((2 * 1.02 if small else 8) + (4 if offload or size < 4 else 0)))
    return state, 4 * share, passing


def step_bytes(shape: ModelShape, size: int) -> tuple[int, int]:
    """Bytes that one step of an engine needs for the prompt ids it reads at once, and those that captured steps hold.

    Captured steps hold what the largest of them needs, and the logits that all of them share.
    """
    step = PROMPT_IDS * (3 * shape.hidden + 3 * shape.queries + 2 * shape.keys + 2 * shape.mlp) * size
    return step, step + ROWS * shape.vocab * size


def parts_of(job: MemoryJob, setting: MemorySetting, kv: int, helper_kv: int, arena: int = 0) -> tuple[MemoryPart, ...]:
    """The arithmetic of one setting, with `kv` bytes for the policy's keys and values and `helper_kv` for those of
    helpers that stay; those of helpers that take turns are in the arena."""
    awake, beside = not setting.park, setting.helpers != "leave"
    step, graphs = step_bytes(job.shape, job.size) if job.samples else (0, 0)
    turns = job.swappable if setting.helpers != "stay" else ()
    stay = [helper for helper in job.helpers if helper not in turns]
    others = helper_kv + sum(helper.weights + helper.step + helper.pages for helper in stay)
    steps, taking_turns = sum(helper.step for helper in turns), ", ".join(helper.name for helper in turns)
    lines = [
        *_weights(job, setting, awake),
        *_learner(job, setting),
        MemoryPart("keys and values", kv, kv * awake, "the engine's pages"),
        MemoryPart("captured steps", graphs, graphs * awake, "CUDA graphs"),
        MemoryPart("engine's step", step, 0, f"{PROMPT_IDS} prompt ids"),
        MemoryPart("other models", others, others, ", ".join(helper.name for helper in stay)),
        MemoryPart(
            "helpers' arena", arena, arena * beside, f"{taking_turns} take turns", sum(h.weights for h in turns)
        ),
        MemoryPart("helpers' steps", steps, steps * beside, "CUDA graphs and what a step needs"),
    ]
    return tuple(part for part in lines if part.sampling or part.learning or part.host)


def _weights(job: MemoryJob, setting: MemorySetting, awake: bool) -> Iterator[MemoryPart]:
    """The policy's weights and adapters, and what its sampler has of them a second time."""
    shape, model, narrow = job.shape, job.recipe.model, job.shape.projections * job.narrow
    four_bits = int(shape.projections * (job.size - FOUR_BIT)) if model.quantize == "4bit" else 0
    weights = shape.parameters * job.size - four_bits
    yield MemoryPart("weights", weights, weights, f"{in_words(shape.parameters)} parameters")
    yield MemoryPart("weights in 8 bits", narrow, narrow * awake, "projections, to sample")
    if model.lora is not None:
        count, size = job.trained
        copy = job.merged if setting.merge == "copy" and job.samples else 0
        saved = job.merged if setting.merge == "in place" else 0  # the weights without adapters, while those are merged
        yield MemoryPart("adapters", count * size, count * size, f"{in_words(count)} parameters in float32")
        yield MemoryPart("merged adapters", copy, copy * awake, "a copy of what they sit on, to sample", saved)


def _learner(job: MemoryJob, setting: MemorySetting) -> Iterator[MemoryPart]:
    """What is there beside the weights to train them."""
    config, (count, size) = job.config, job.trained
    state, sums, passing = optimizer_bytes(job)
    away = job.processes * (sums + state) if config.optimizer.offload else 0
    state, sums = (0, 0) if away else (state, sums)
    forward, backward = activations(job, setting)
    sums += max(0, passing - forward - backward)  # a micro-batch's own gradients grow while its activations go
    reference = count * size if method_of(config.method).needs_reference(config) else 0
    moments = "8-bit" if config.optimizer.name == "adamw-8bit" else "float32"
    again = {"none": "nothing", "mlp": "the MLPs' way up", "block": "each block"}[setting.checkpointing]
    yield MemoryPart("optimizer", state, state, f"{'float32 masters and ' * (size < 4)}two {moments} moments", away)
    yield MemoryPart("reference", reference, reference, "the trained weights as they were")
    yield MemoryPart("gradients", 0, sums, "float32")
    yield MemoryPart("activations", 0, forward, f"{setting.tokens} tokens, {again} computed again")
    yield MemoryPart("backward", 0, backward, "logits in chunks, or one layer")


def in_words(number: int) -> str:
    """A number of parameters in words."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
