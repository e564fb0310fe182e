"""The arithmetic of memory: what a run has on its device while it samples and while it learns. No weights.

`benchmarks/memory_plan.py` and `benchmarks/long.py` compare it with measured peaks; what is chosen: `fit.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from upshot.config.method import method_of
from upshot.config.recipe import Recipe, TrainConfig
from upshot.engine.llama.merged import Merging
from upshot.rollout.credit.rules import credit_rule
from upshot.serving.swap.layout import MemoryLayout, lay_out, round_up
from upshot.training.learner.forward.lean import Checkpointing
from upshot.training.learner.forward.logprobs import CHUNK_BYTES
from upshot.training.learner.memory.shape import ModelShape

CONTEXT, SLACK = 1 << 30, 0.06
"""Left alone of a GPU: what driver, libraries and compiled kernels take; a share for gaps and wrong predictions."""
PROMPT_IDS, ROWS = 16384, 1024
"""Prompt ids that the engine reads in one step on a GPU, and sequences that it extends at once."""
FOUR_BIT = 0.52
"""Bytes of a weight in 4 bits, with its share of the scales."""
PROMPT = 1024
"""Tokens assumed for a prompt where nothing limits its length."""


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

    def region(self, tokens: int) -> int:
        """Bytes of its place in an arena, with keys and values of `tokens` tokens; weights begin at round addresses."""
        return self.weights + self.weights // 256 + (1 << 16) + self.pages + tokens * self.kv


class MemoryJob:
    """A phase of a recipe on a model whose numbers have `size` bytes: what it must have, whatever is chosen.

    `measured`: bytes that a token of a micro-batch was seen to keep for the backward on this device; 0: unknown.
    """

    def __init__(
        self, recipe: Recipe, shape: ModelShape, size: int, config: TrainConfig, helpers: tuple[HelperModel, ...] = (),
        processes: int = 1, measured: int = 0,
    ) -> None:  # fmt: skip
        self.recipe, self.shape, self.size, self.config = recipe, shape, size, config
        self.helpers, self.processes, self.measured = helpers, processes, measured
        model, lora, futures = recipe.model, recipe.model.lora, recipe.futures
        self.samples = config.samples and model.engine.name == "upshot"  # vLLM has memory of its own
        self.narrow = self.samples and model.engine.weights == "fp8"  # the engine has the projections in 8 bits, too
        self.swappable = tuple(helper for helper in helpers if not helper.copy)
        self.kv = shape.kv_numbers * (1 if model.engine.kv == "fp8" else size) * self.samples  # of one token
        self.all_kv = max(self.kv + sum(helper.kv for helper in helpers), 1)  # in all engines

        def length(turns: int) -> int:
            tokens = PROMPT + (recipe.episode.max_turns + turns) * recipe.episode.max_tokens
            return model.max_context or min(tokens, shape.context or tokens)

        # The longest sequence that can come to be trained; where nothing is sampled only the data says (0).
        ahead = 2 * futures.rounds * credit_rule(recipe.credit).trains_futures
        self.longest = length(ahead) if config.samples else model.max_context or 0
        self.least = max(self.longest, 2048)  # tokens whose keys and values an engine needs
        replies = recipe.train.prompts_per_step * recipe.train.group_size * futures.leaves
        self.wanted = max(min(replies, ROWS) * length(2 * futures.rounds), self.least)  # all of a step at their longest
        copied = any(helper.copy for helper in helpers)
        # Adapters can be merged in place if nobody but engine and learner reads the weights.
        self.lends = model.quantize == "none" and not model.exact and not self.narrow and not copied
        self.trained = (shape.parameters, size) if lora is None else (sum(shape.adapters(lora)), 4)
        self.drops = lora is not None and lora.dropout > 0 and method_of(config.method).dropout
        self.called = lora is not None and (model.quantize != "none" or lora.kind == "dora" or self.drops)  # by peft
        self.thin = shape.lean and not self.called and not model.exact  # recomputes layers, or MLPs alone, one by one
        self.kept = self._kept(lora.r * len(shape.adapters(lora)) if lora else 0)

    def _kept(self, ranks: int) -> int:
        """Bytes that a token keeps in all layers where nothing is computed again (`forward/lean.py` lists them)."""
        shape, size = self.shape, self.size
        own = (2 * (shape.hidden + shape.queries + shape.keys + shape.mlp) + shape.norms) * size
        if not shape.lean:  # unrotated and ungated parts as well, norms in float32
            own = 2 * own + 8 * shape.hidden
        elif self.called:  # inputs of the projections once more, in float32
            own += 4 * (5 * shape.hidden + shape.queries + shape.mlp) + size * (2 * shape.hidden + shape.mlp)
        # Of a capped score: two numbers in float32, one in the model's dtype, of every head and every earlier token.
        own += (8 + size) * shape.capped * (self.longest or shape.context)
        computed = own * shape.layers + ranks * size
        # For the learner's own block the sum was compared with GPUs: a measurement may find more, not less.
        return max(self.measured, computed) if shape.lean or not self.measured else self.measured


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


def usable(total: int) -> int:
    """Bytes of a device that can be planned with."""
    return int(max(total - CONTEXT, 0) * (1 - SLACK))


def activations(job: MemoryJob, setting: MemorySetting) -> tuple[int, int]:
    """Bytes that a micro-batch's forward leaves for its backward, and those beside that at the backward's highest: in
    the head (a chunk of logits, the head's gradient) or in the last layer."""
    shape, size, tokens = job.shape, job.size, setting.tokens
    layers = shape.layers if setting.layers is None else setting.layers
    whole = job.kept // shape.layers - shape.hidden * size
    spared = {"none": 0, "mlp": 2 * shape.mlp * size, "block": whole}[setting.checkpointing]
    logits, ends = tokens * shape.vocab * size, 4 * shape.hidden * size  # embedding, last norm, and their gradients
    head = min(CHUNK_BYTES, logits)
    if job.recipe.model.lora is None:  # summed in float32 where there are several chunks
        head += shape.vocab * shape.hidden * (size + 4 * (logits > CHUNK_BYTES))
    # The last layer, where the backward begins, is computed again only if all are.
    inside = ((1 if job.thin else 3) * shape.mlp + 3 * shape.hidden) * size + spared * (layers == shape.layers)
    return tokens * (job.kept - layers * spared + ends), max(head, tokens * inside)


def optimizer_bytes(job: MemoryJob) -> tuple[int, int, int]:
    """Bytes of the optimizer's state, of summed gradients (float32), and of one micro-batch's where these are not added
    up where they arise, for one process."""
    (count, size), config = job.trained, job.config.optimizer
    masters = config.offload or size < 4
    share, passing = count, size * count * masters
    if job.processes > 1:  # whole matrices belong to one process; gradients arise whole and are summed one by one
        largest = job.shape.hidden * (1 if job.recipe.model.lora else job.shape.vocab)
        share, passing = max(count // job.processes, largest), size * count + 4 * largest
    return int(share * ((2.04 if config.name == "adamw-8bit" else 8) + 4 * masters)), 4 * share, passing


def step_bytes(shape: ModelShape, size: int) -> tuple[int, int]:
    """Bytes of an engine's step for the prompt ids it reads at once, and what captured steps hold, logits included."""
    step = PROMPT_IDS * (3 * shape.hidden + 3 * shape.queries + 2 * shape.keys + 2 * shape.mlp) * size
    return step, step + ROWS * shape.vocab * size


def make_plan(job: MemoryJob, setting: MemorySetting, tokens: int, limit: int = 0) -> MemoryPlan:
    """The plan with keys and values of `tokens` tokens in every engine; helpers' arena is what is left of `limit`, and
    at least what the largest of them needs."""
    turns = job.swappable if setting.helpers != "stay" else ()
    kv = {helper.name: tokens * helper.kv for helper in job.helpers if helper not in turns}
    plan = MemoryPlan(setting, tokens * job.kv, kv, parts_of(job, setting, tokens * job.kv, sum(kv.values())), limit)
    if not turns:
        return plan
    regions = {helper.name: helper.region(tokens) for helper in turns}
    room = limit - (plan.sampling if setting.helpers == "leave" else plan.peak)
    layout = lay_out(regions, max(room, round_up(max(regions.values()))))
    parts = parts_of(job, setting, tokens * job.kv, sum(kv.values()), layout.size if layout else 0)
    return replace(plan, parts=parts, layout=layout)


def parts_of(job: MemoryJob, setting: MemorySetting, kv: int, helper_kv: int, arena: int = 0) -> tuple[MemoryPart, ...]:
    """The arithmetic of one setting: `kv` bytes for the policy's keys and values, `helper_kv` for those of helpers that
    stay; those of helpers that take turns are in the arena."""
    shape, model, config, (count, size) = job.shape, job.recipe.model, job.config, job.trained
    awake, beside, adapters = not setting.park, setting.helpers != "leave", count * size * (model.lora is not None)
    step, graphs = step_bytes(shape, job.size) if job.samples else (0, 0)
    turns = job.swappable if setting.helpers != "stay" else ()
    stay = [helper for helper in job.helpers if helper not in turns]
    others = helper_kv + sum(helper.weights + helper.step + helper.pages for helper in stay)
    steps, host = sum(helper.step for helper in turns), sum(helper.weights for helper in turns)
    four_bits = int(shape.projections * (job.size - FOUR_BIT)) if model.quantize == "4bit" else 0
    weights, narrow = shape.parameters * job.size - four_bits, shape.projections * job.narrow
    doubled = model.lora is not None and job.samples and not model.exact
    merged = shape.merged(model.lora, job.narrow) * job.size if doubled and model.lora else 0
    copy, saved = (merged * (setting.merge == way) for way in ("copy", "in place"))
    (state, sums, passing), (forward, backward) = optimizer_bytes(job), activations(job, setting)
    away = job.processes * (sums + state) * config.optimizer.offload
    state, sums = (0, 0) if away else (state, sums)
    sums += max(0, passing - forward - backward)  # a micro-batch's own gradients grow while its activations go
    reference = count * size * method_of(config.method).needs_reference(config)
    millions = shape.parameters / 1e6
    counted = f"{millions / 1e3:.2f} B" if millions >= 1e3 else f"{millions:.1f} M"
    lines = [
        MemoryPart("weights", weights, weights, f"{counted} parameters"),
        MemoryPart("weights in 8 bits", narrow, narrow * awake, "projections, to sample"),
        MemoryPart("adapters", adapters, adapters, f"{count / 1e6:.1f} M parameters in float32"),
        MemoryPart("merged adapters", copy, copy * awake, "a copy of what they sit on, to sample", saved),
        MemoryPart("optimizer", state, state, "masters and moments", away),
        MemoryPart("reference", reference, reference, "the trained weights as they were"),
        MemoryPart("gradients", 0, sums, "float32"),
        MemoryPart("activations", 0, forward, f"{setting.tokens} tokens"),
        MemoryPart("backward", 0, backward, "a chunk of logits, or one layer"),
        MemoryPart("keys and values", kv, kv * awake, "the engine's pages"),
        MemoryPart("captured steps", graphs, graphs * awake, "CUDA graphs"),
        MemoryPart("engine's step", step, 0, f"{PROMPT_IDS} prompt ids"),
        MemoryPart("other models", others, others, ", ".join(helper.name for helper in stay)),
        MemoryPart("helpers' arena", arena, arena * beside, ", ".join(h.name for h in turns) + " take turns", host),
        MemoryPart("helpers' steps", steps, steps * beside, "CUDA graphs and what a step needs"),
    ]
    return tuple(part for part in lines if part.sampling or part.learning or part.host)
