"""The arithmetic of memory: what a run has on its device while it samples and while it learns. Choices: `fit.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from upshot.config.method import method_of
from upshot.config.recipe import Recipe, TrainConfig
from upshot.engine.llama.merged import Merging
from upshot.models.local import find_config
from upshot.rollout.credit.rules import credit_rule
from upshot.rollout.futures.classmates.map_file import classmate_names
from upshot.serving.swap.layout import MemoryLayout, lay_out, round_up
from upshot.training.learner.forward.lean import Checkpointing
from upshot.training.learner.forward.packed import CHUNK_BYTES
from upshot.training.learner.memory.shape import ModelShape, shape_of
from upshot.training.snapshots import states_at_once

GIB = 1 << 30
CONTEXT, SLACK = GIB, 0.06  # left alone of a GPU: for driver, libraries and compiled kernels; a share for gaps
PROMPT, PROMPT_IDS, ROWS = 1024, 16384, 1024  # tokens assumed of a prompt; ids read and rows extended at once
CALLED, FOREIGN = 3.2, 2.4  # times as much a token keeps if peft runs adapters, or transformers the block
FOUR_BIT = 0.52  # bytes of a weight in 4 bits with its share of scales


@dataclass(frozen=True)
class HelperModel:
    """Bytes of another model on the device."""

    name: str
    weights: int  # those that it does not share with the policy
    step: int
    kv: int  # of one token
    pages: int = 0  # keys and values of all tokens, where the recipe fixes them


@dataclass(frozen=True)
class MemorySetting:
    """What can be chosen. Helpers are always there, take turns in one arena, or that and lend it to the learner."""

    tokens: int  # of a micro-batch
    checkpointing: Checkpointing = "none"
    layers: int | None = None  # the first ones, which are computed again; None: all
    merge: Merging = "copy"
    park: bool = False  # the engine gives its memory back while the learner works
    helpers: Literal["stay", "swap", "leave"] = "stay"


@dataclass(frozen=True)
class MemoryPart:
    """One line of the arithmetic, in bytes."""

    name: str
    sampling: int
    learning: int
    why: str = ""
    host: int = 0  # in the host's memory


@dataclass(frozen=True)
class MemoryPlan:
    """Settings, and the bytes that they need."""

    setting: MemorySetting
    kv_bytes: int  # for the policy's keys and values; 0: the engine decides
    helper_kv: dict[str, int]  # the same for each helper that takes no turns
    parts: tuple[MemoryPart, ...]
    limit: int  # 0: not limited
    layout: MemoryLayout | None = None  # the places of helpers that take turns

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
    """A phase of a recipe on a model whose numbers have `size` bytes: what it must have, whatever is chosen."""

    def __init__(
        self, recipe: Recipe, shape: ModelShape, size: int, config: TrainConfig | None = None, processes: int = 1
    ) -> None:
        config, model, lora, futures = config or recipe.train, recipe.model, recipe.model.lora, recipe.futures
        self.recipe, self.shape, self.size, self.config, self.processes = recipe, shape, size, config, processes
        self.samples = config.samples and model.engine.name == "upshot"  # vLLM has memory of its own
        self.narrow = self.samples and model.engine.weights == "fp8"  # the engine has the projections in 8 bits, too
        self.kv = shape.kv_numbers * (1 if model.engine.kv == "fp8" else size) * self.samples  # of one token
        self.trained = (sum(shape.adapters(lora)), 4) if lora else (shape.parameters, size)
        self.merged = shape.merged(lora, self.narrow) * size if lora and self.samples and not model.exact else 0
        self.helpers = tuple(self._helpers()) if config.samples else ()
        self.swappable = tuple(helper for helper in self.helpers if not helper.name.startswith("policy@"))
        self.all_kv = max(self.kv + sum(helper.kv for helper in self.helpers), 1)  # in all engines
        # The longest sequences that can be trained and sampled; without sampling only the data says (0).
        rounds = futures.rounds * credit_rule(recipe.credit).trains_futures, futures.rounds
        whole = [PROMPT + (recipe.episode.max_turns + 2 * n) * recipe.episode.max_tokens for n in rounds]
        trained = model.max_context or min(whole[0], shape.context or whole[0])
        sampled = model.max_context or min(whole[1], shape.context or whole[1])
        limit = model.max_context or shape.context or whole[1]  # how much others say is not known
        self.longest = trained if config.samples else model.max_context or 0
        self.least = max(self.longest, 2048)  # tokens whose keys and values an engine needs
        replies = min(recipe.train.prompts_per_step * recipe.train.group_size * futures.leaves, ROWS)
        self.wanted = max(replies * sampled, limit, self.least)  # all of a step as long as the recipe makes them
        self.useful = max(replies * limit, self.wanted)  # all of a step at their longest
        self.drops = lora is not None and lora.dropout > 0 and method_of(config.method).dropout
        called = lora is not None and (model.quantize != "none" or lora.kind == "dora" or self.drops)  # by peft
        self.thin = shape.lean and not called and not model.exact  # recomputes layers, or MLPs alone, one by one
        # Bytes that a token keeps in all layers where nothing is computed again (`forward/lean.py` lists them).
        numbers = 2 * (shape.hidden + shape.queries + shape.keys + shape.mlp) + shape.norms
        kept = int(numbers * size * (FOREIGN if not shape.lean else CALLED if called else 1))
        # Of a capped score: two numbers in float32, one in the model's dtype, of every head and every earlier token.
        kept = (kept + (8 + size) * shape.capped * (self.longest or shape.context)) * shape.layers
        kept += lora.r * len(shape.adapters(lora)) * size if lora else 0
        # For the learner's own block the product was compared with GPUs: a measurement may find more, not less.
        self.kept = max(shape.measured, kept) if shape.lean else shape.measured or kept

    def _helpers(self) -> Iterator[HelperModel]:
        """Copies of the policy, of which what is not trained is shared; models on its device, one for each spec."""
        models, ahead, (count, size) = self.recipe.needed_models, self.recipe.train.async_steps, self.trained
        names = [*classmate_names(self.recipe.futures), *(spec.model for spec in models.values())]
        times = [name.removeprefix("policy@") for name in names if name.startswith("policy@")]
        copies = {at: 1 if at == "start" else states_at_once(int(at), ahead) for at in times} | {"ahead": ahead}
        for at, n in copies.items():  # a new adapter adds nothing to what it sits on
            weights = count * size + self.merged * (at != "start") + self.shape.projections * self.narrow
            if n:
                yield HelperModel(f"policy@{at}", n * weights, n * sum(step_bytes(self.shape, self.size)), n * self.kv)
        beside = {name: spec for name, spec in models.items() if spec.runs_on(self.recipe.model.device)}
        for name, spec in beside.items():
            config = find_config(spec.model, offline=True)
            if config is not None and name == next(first for first in beside if beside[first] == spec):
                shape, size = shape_of(config), 4 if spec.dtype == "float32" else self.size
                kv = 0 if spec.kv_gb else shape.kv_numbers * (1 if spec.kv == "fp8" else size)
                weights = shape.parameters * size - shape.projections * (size - 1) * (spec.weights == "fp8")
                yield HelperModel(name, weights, sum(step_bytes(shape, size)), kv, int(spec.kv_gb * GIB))


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
    stay = [helper for helper in job.helpers if helper not in turns]
    kv = {helper.name: tokens * helper.kv for helper in stay}
    others = sum(kv.values()) + sum(helper.weights + helper.step + helper.pages for helper in stay)
    beside, steps = setting.helpers != "leave", sum(helper.step for helper in turns)
    parts = [
        *_policy_parts(job, setting, tokens * job.kv),
        *_learner_parts(job, setting),
        MemoryPart("other models", others, others, ", ".join(kv)),
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
    shape, model, awake, (count, size) = job.shape, job.recipe.model, not setting.park, job.trained
    four_bits = int(shape.projections * (job.size - FOUR_BIT)) if model.quantize == "4bit" else 0
    weights, narrow = shape.parameters * job.size - four_bits, shape.projections * job.narrow
    yield MemoryPart("weights", weights, weights, f"{shape.parameters:,} parameters")
    yield MemoryPart("weights in 8 bits", narrow, narrow * awake, "projections, to sample")
    if model.lora is not None:
        copy, saved = (job.merged * (setting.merge == way) for way in ("copy", "in place"))
        yield MemoryPart("adapters", count * size, count * size, f"{count:,} parameters in float32")
        yield MemoryPart("merged adapters", copy, copy * awake, "a copy of what they sit on, to sample", saved)
    if job.samples:
        step, graphs = step_bytes(shape, job.size)
        yield MemoryPart("keys and values", kv, kv * awake, "the engine's pages")
        yield MemoryPart("captured steps", graphs, graphs * awake, "CUDA graphs")
        yield MemoryPart("engine's step", step, 0, f"{PROMPT_IDS} prompt ids")


def _learner_parts(job: MemoryJob, setting: MemorySetting) -> Iterator[MemoryPart]:
    shape, size, tokens, config, lora = job.shape, job.size, setting.tokens, job.config, job.recipe.model.lora
    layers, whole = setting.layers or shape.layers, job.kept // shape.layers - shape.hidden * size
    spared = {"none": 0, "mlp": 2 * shape.mlp * size, "block": whole}[setting.checkpointing]
    forward = tokens * (job.kept - layers * spared + 4 * shape.hidden * size)  # embedding, last norm, their gradients
    # The backward is at its highest in the head (logits, its gradient) or the last layer (computed again if all are).
    logits, of_weights = tokens * shape.vocab * size, shape.vocab * shape.hidden * (lora is None)
    head = min(CHUNK_BYTES, logits) + of_weights * (size + 4 * (logits > CHUNK_BYTES))  # of several chunks in float32
    inside = ((1 if job.thin else 3) * shape.mlp + 3 * shape.hidden) * size + spared * (layers == shape.layers)
    backward = max(head, tokens * inside)
    (count, size), offload = job.trained, config.optimizer.offload
    masters = offload or size < 4
    # `passing`: gradients of a micro-batch that are not added up where they arise; they grow while activations go.
    share, passing = count, size * count * masters
    if job.processes > 1:  # whole matrices belong to one process; gradients arise whole and are summed one by one
        largest = shape.hidden * (1 if lora else shape.vocab)
        share, passing = max(count // job.processes, largest), size * count + 4 * largest
    state = int(share * ((2.04 if config.optimizer.name == "adamw-8bit" else 8) + 4 * masters))
    here, away = (0, job.processes * (state + 4 * share)) if offload else (state, 0)
    reference = count * size * method_of(config.method).needs_reference(config)
    yield MemoryPart("optimizer", here, here, "masters and moments", away)
    yield MemoryPart("reference", reference, reference, "the trained weights as they were")
    yield MemoryPart("gradients", 0, 4 * share * (not offload) + max(0, passing - forward - backward), "float32")
    yield MemoryPart("activations", 0, forward, f"{tokens} tokens")
    yield MemoryPart("backward", 0, backward, "a chunk of logits, or one layer")
