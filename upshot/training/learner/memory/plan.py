"""The arithmetic of memory: what a run has on its device while it samples and while it learns. No weights.

`benchmarks/memory_plan.py` and `benchmarks/long.py` compare it with measured peaks; what is chosen: `fit.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from upshot.config.method import method_of
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Recipe, TrainConfig
from upshot.engine.llama.merged import Merging
from upshot.models.local import find_config
from upshot.rollout.credit.rules import credit_rule
from upshot.rollout.futures.classmates.map_file import classmate_names
from upshot.serving.swap.layout import MemoryLayout, lay_out, round_up
from upshot.training.learner.forward.lean import Checkpointing
from upshot.training.learner.forward.packed import CHUNK_BYTES
from upshot.training.learner.memory.shape import ModelShape
from upshot.training.snapshots import states_at_once

GIB = 1 << 30
CONTEXT, SLACK = GIB, 0.06
"""Left alone of a GPU: what driver, libraries and compiled kernels take; a share for gaps and wrong predictions."""
PROMPT, PROMPT_IDS, ROWS = 1024, 16384, 1024
"""Tokens assumed for a prompt of unlimited length; prompt ids that an engine reads and rows it extends at once."""
CALLED, FOREIGN, FOUR_BIT = 3.2, 2.4, 0.52
"""What a token keeps, as a multiple, where adapters are called as modules (inputs again, in float32) and where
transformers runs the block (unrotated and ungated parts, too); bytes of a weight in 4 bits with its share of scales."""


@dataclass(frozen=True)
class HelperModel:
    """Another model on the device: bytes of weights it does not share with the policy, of its engine's steps, of one
    token's keys and values, and of all of these where the recipe fixes them. A `copy` of the policy takes no turns."""

    name: str
    weights: int
    step: int
    kv: int
    copy: bool = False
    pages: int = 0


@dataclass(frozen=True)
class MemorySetting:
    """What can be chosen: `tokens` of a micro-batch; what is computed again, in the first `layers` (None: all); how
    adapters are merged; whether the engine gives its memory back (`park`) while the learner works; whether helpers
    are always there (stay), take turns in one arena (swap), or that and lend it to the learner (leave)."""

    tokens: int
    checkpointing: Checkpointing = "none"
    layers: int | None = None
    merge: Merging = "copy"
    park: bool = False
    helpers: Literal["stay", "swap", "leave"] = "stay"


@dataclass(frozen=True)
class MemoryPart:
    """One line of the arithmetic, in bytes; `host`: of the host's memory."""

    name: str
    sampling: int
    learning: int
    why: str = ""
    host: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Settings, and what they need of `limit` bytes (0: not limited). Bytes for keys and values: of the policy, and of
    each helper that takes no turns; 0: the engine decides. `layout`: the places of helpers that take turns."""

    setting: MemorySetting
    kv_bytes: int
    helper_kv: dict[str, int]
    parts: tuple[MemoryPart, ...]
    limit: int
    layout: MemoryLayout | None = None

    @property
    def sampling(self) -> int:
        """Bytes while the engine samples."""
        return sum(part.sampling for part in self.parts)

    @property
    def learning(self) -> int:
        """Bytes while the learner works."""
        return sum(part.learning for part in self.parts)

    @property
    def peak(self) -> int:
        """The most that is there at once."""
        return max(self.sampling, self.learning)


class MemoryJob:
    """A phase of a recipe on a model whose numbers have `size` bytes: what it must have, whatever is chosen.

    `measured`: bytes that a token of a micro-batch was seen to keep for the backward on this device; 0: unknown.
    """

    def __init__(
        self, recipe: Recipe, shape: ModelShape, size: int, config: TrainConfig | None = None, processes: int = 1,
        measured: int = 0,
    ) -> None:  # fmt: skip
        config, model, lora, futures = config or recipe.train, recipe.model, recipe.model.lora, recipe.futures
        self.recipe, self.shape, self.size, self.config = recipe, shape, size, config
        self.processes, self.measured = processes, measured
        self.helpers = tuple(list_helpers(recipe, shape, size)) if config.samples else ()
        self.swappable = tuple(helper for helper in self.helpers if not helper.copy)
        self.samples = config.samples and model.engine.name == "upshot"  # vLLM has memory of its own
        self.narrow = self.samples and model.engine.weights == "fp8"  # the engine has the projections in 8 bits, too
        self.kv = shape.kv_numbers * (1 if model.engine.kv == "fp8" else size) * self.samples  # of one token
        self.all_kv = max(self.kv + sum(helper.kv for helper in self.helpers), 1)  # in all engines

        def length(turns: int) -> int:
            tokens = PROMPT + (recipe.episode.max_turns + turns) * recipe.episode.max_tokens
            return model.max_context or min(tokens, shape.context or tokens)

        # The longest sequence that can come to be trained; where nothing is sampled only the data says (0).
        ahead = 2 * futures.rounds * credit_rule(recipe.credit).trains_futures
        self.longest = length(ahead) if config.samples else model.max_context or 0
        self.least = max(self.longest, 2048)  # tokens whose keys and values an engine needs
        replies = recipe.train.prompts_per_step * recipe.train.group_size * futures.leaves
        self.wanted = max(min(replies, ROWS) * length(2 * futures.rounds), self.least)  # all of a step at their longest
        # Adapters can be merged in place if nobody but engine and learner reads the weights.
        alone = self.swappable == self.helpers and not model.exact
        self.lends = alone and model.quantize == "none" and not self.narrow
        self.trained = (shape.parameters, size) if lora is None else (sum(shape.adapters(lora)), 4)
        self.drops = lora is not None and lora.dropout > 0 and method_of(config.method).dropout
        called = lora is not None and (model.quantize != "none" or lora.kind == "dora" or self.drops)  # by peft
        self.thin = shape.lean and not called and not model.exact  # recomputes layers, or MLPs alone, one by one
        # Bytes that a token keeps in all layers where nothing is computed again (`forward/lean.py` lists them).
        numbers = 2 * (shape.hidden + shape.queries + shape.keys + shape.mlp) + shape.norms
        kept = int(numbers * size * (FOREIGN if not shape.lean else CALLED if called else 1))
        # Of a capped score: two numbers in float32, one in the model's dtype, of every head and every earlier token.
        kept += (8 + size) * shape.capped * (self.longest or shape.context)
        kept = kept * shape.layers + (lora.r * len(shape.adapters(lora)) * size if lora else 0)
        # For the learner's own block the sum was compared with GPUs: a measurement may find more, not less.
        self.kept = max(measured, kept) if shape.lean or not measured else measured


def list_helpers(recipe: Recipe, policy: ModelShape, size: int) -> Iterator[HelperModel]:
    """Frozen copies of the policy, and helper models on its device; roles with the same spec share one."""
    models, model, ahead = named_models(recipe), recipe.model, recipe.train.async_steps
    states = [spec.model.partition("@")[2] for spec in models.values() if "@" in spec.model and spec.kind == "policy"]
    for when in dict.fromkeys([*states, *(f"ahead-{n}" for n in range(ahead))]):
        narrow, weights = model.engine.weights == "fp8", policy.parameters * size
        if model.lora is not None:  # what is not trained is shared; a new adapter adds nothing to what is shared
            merged = policy.merged(model.lora, narrow) * size * (when != "start")
            weights = sum(policy.adapters(model.lora)) * 4 + merged
        kv = policy.kv_numbers * (1 if model.engine.kv == "fp8" else size)
        sizes = weights + policy.projections * narrow, sum(step_bytes(policy, size)), kv
        for number in range(states_at_once(int(when), ahead) if when.isdigit() else 1):
            yield HelperModel(f"policy@{when}" + (f" ({number})" if number else ""), *sizes, copy=True)
    seen: list[ModelSpec] = []
    for name, spec in models.items():
        if not is_beside(spec, recipe) or spec in seen:
            continue
        seen.append(spec)
        if (config := find_config(spec.model, offline=True)) is not None:
            shape, each = ModelShape(config), 4 if spec.dtype == "float32" else size
            kv = 0 if spec.kv_gb else shape.kv_numbers * (1 if spec.kv == "fp8" else each)
            weights = shape.parameters * each - shape.projections * (each - 1) * (spec.weights == "fp8")
            yield HelperModel(name, weights, sum(step_bytes(shape, each)), kv, pages=int(spec.kv_gb * GIB))


def is_beside(spec: ModelSpec, recipe: Recipe) -> bool:
    """Whether a helper model shares the policy's device."""
    return spec.kind == "local" and spec.device in ("auto", recipe.model.device)


def named_models(recipe: Recipe) -> dict[str, ModelSpec]:
    """Helper models by name: those of `models` that are asked, and copies of the policy that classmates are."""
    copies = (name for name in classmate_names(recipe.futures) if name.startswith("policy@"))
    return recipe.needed_models | {name: ModelSpec(model=name) for name in copies}


def usable(total: int) -> int:
    """Bytes of a device that can be planned with."""
    return int(max(total - CONTEXT, 0) * (1 - SLACK))


def step_bytes(shape: ModelShape, size: int) -> tuple[int, int]:
    """Bytes of an engine's step for the prompt ids it reads at once, and what captured steps hold, logits included."""
    step = PROMPT_IDS * (3 * shape.hidden + 3 * shape.queries + 2 * shape.keys + 2 * shape.mlp) * size
    return step, step + ROWS * shape.vocab * size


def make_plan(job: MemoryJob, setting: MemorySetting, tokens: int, limit: int = 0) -> MemoryPlan:
    """The plan with keys and values of `tokens` tokens in every engine. Helpers that take turns get an arena of what
    is left of `limit`, but at least what the largest of them needs."""
    turns = job.swappable if setting.helpers != "stay" else ()
    stay = {helper.name: helper for helper in job.helpers if helper not in turns}
    kv = {name: tokens * helper.kv for name, helper in stay.items()}
    others = sum(kv.values()) + sum(helper.weights + helper.step + helper.pages for helper in stay.values())
    beside, steps = setting.helpers != "leave", sum(helper.step for helper in turns)
    parts = [
        *_policy_parts(job, setting, tokens * job.kv),
        *_learner_parts(job, setting),
        MemoryPart("other models", others, others, ", ".join(stay)),
        MemoryPart("helpers' steps", steps, steps * beside, "CUDA graphs and what a step needs"),
    ]
    parts = [part for part in parts if part.sampling or part.learning or part.host]
    plan = MemoryPlan(setting, tokens * job.kv, kv, tuple(parts), limit)
    if not turns:
        return plan
    # Of each helper: weights, which begin at round addresses, and keys and values.
    regions = {h.name: h.weights + h.weights // 256 + (1 << 16) + h.pages + tokens * h.kv for h in turns}
    room = limit - (plan.peak if beside else plan.sampling)
    layout = lay_out(regions, max(room, round_up(max(regions.values()))))
    size, host = layout.size if layout else 0, sum(helper.weights for helper in turns)
    arena = MemoryPart("helpers' arena", size, size * beside, f"{', '.join(regions)} take turns", host)
    return replace(plan, parts=(*plan.parts, arena), layout=layout)


def _policy_parts(job: MemoryJob, setting: MemorySetting, kv: int) -> Iterator[MemoryPart]:
    """The policy and its engine, with `kv` bytes for keys and values."""
    shape, model, (count, size) = job.shape, job.recipe.model, job.trained
    awake, millions = not setting.park, shape.parameters / 1e6
    counted = f"{millions / 1e3:.2f} B" if millions >= 1e3 else f"{millions:.1f} M"
    four_bits = int(shape.projections * (job.size - FOUR_BIT)) if model.quantize == "4bit" else 0
    weights, narrow = shape.parameters * job.size - four_bits, shape.projections * job.narrow
    yield MemoryPart("weights", weights, weights, f"{counted} parameters")
    yield MemoryPart("weights in 8 bits", narrow, narrow * awake, "projections, to sample")
    if model.lora is not None:
        merged = shape.merged(model.lora, job.narrow) * job.size * (job.samples and not model.exact)
        copy, saved = (merged * (setting.merge == way) for way in ("copy", "in place"))
        yield MemoryPart("adapters", count * size, count * size, f"{count / 1e6:.1f} M parameters in float32")
        yield MemoryPart("merged adapters", copy, copy * awake, "a copy of what they sit on, to sample", saved)
    if job.samples:
        step, graphs = step_bytes(shape, job.size)
        yield MemoryPart("keys and values", kv, kv * awake, "the engine's pages")
        yield MemoryPart("captured steps", graphs, graphs * awake, "CUDA graphs")
        yield MemoryPart("engine's step", step, 0, f"{PROMPT_IDS} prompt ids")


def _learner_parts(job: MemoryJob, setting: MemorySetting) -> Iterator[MemoryPart]:
    """The optimizer's state, and what a micro-batch needs; all of it for one process."""
    shape, size, tokens, config, lora = job.shape, job.size, setting.tokens, job.config, job.recipe.model.lora
    layers = shape.layers if setting.layers is None else setting.layers
    whole = job.kept // shape.layers - shape.hidden * size
    spared = {"none": 0, "mlp": 2 * shape.mlp * size, "block": whole}[setting.checkpointing]
    ends = 4 * shape.hidden * size  # embedding, last norm, and their gradients
    forward = tokens * (job.kept - layers * spared + ends)
    # The backward is at its highest in the head (a chunk of logits, the head's gradient) or in the last layer.
    logits = tokens * shape.vocab * size
    head = min(CHUNK_BYTES, logits)
    if lora is None:  # summed in float32 where there are several chunks
        head += shape.vocab * shape.hidden * (size + 4 * (logits > CHUNK_BYTES))
    # The last layer, where the backward begins, is computed again only if all are.
    inside = ((1 if job.thin else 3) * shape.mlp + 3 * shape.hidden) * size + spared * (layers == shape.layers)
    backward = max(head, tokens * inside)

    (count, size), offload = job.trained, config.optimizer.offload
    masters = offload or size < 4
    # Gradients of a micro-batch that are not added up where they arise.
    share, passing = count, size * count * masters
    if job.processes > 1:  # whole matrices belong to one process; gradients arise whole and are summed one by one
        largest = shape.hidden * (1 if lora else shape.vocab)
        share, passing = max(count // job.processes, largest), size * count + 4 * largest
    state = int(share * ((2.04 if config.optimizer.name == "adamw-8bit" else 8) + 4 * masters))
    here, away = (0, job.processes * (state + 4 * share)) if offload else (state, 0)
    sums = 4 * share * (not offload) + max(0, passing - forward - backward)  # `passing` grows while activations go
    reference = count * size * method_of(config.method).needs_reference(config)
    yield MemoryPart("optimizer", here, here, "masters and moments", away)
    yield MemoryPart("reference", reference, reference, "the trained weights as they were")
    yield MemoryPart("gradients", 0, sums, "float32")
    yield MemoryPart("activations", 0, forward, f"{tokens} tokens")
    yield MemoryPart("backward", 0, backward, "a chunk of logits, or one layer")
