"""From a recipe to its memory plan: the fastest settings that fit, or why nothing does and what would; and to words."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from upshot.config.load import load_recipe
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import PolicyConfig, Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.engine.llama.agreement import FAILURES
from upshot.models.local import pick_device
from upshot.models.tiny import tiny_config
from upshot.rollout.futures.classmates.map_file import classmate_names
from upshot.training.learner.batch import WITHOUT_PLAN, Datum, pack
from upshot.training.learner.forward.dropout import without_dropout
from upshot.training.learner.forward.packed import PackedForward
from upshot.training.learner.forward.select import at_rest, checkpointing_of, set_checkpointing, states_of
from upshot.training.learner.memory.plan import (
    HelperModel,
    MemoryJob,
    MemoryPart,
    MemoryPlan,
    MemorySetting,
    make_plan,
    step_bytes,
    usable,
)
from upshot.training.learner.memory.shape import ModelShape, find_config
from upshot.training.snapshots import states_at_once

SIZES, BUSY, SMALL = (32768, 16384, 8192, 4096, 2048, 1024), 8192, 500_000_000
"""Tokens of a micro-batch to try; how many keep a GPU busy with a model of more than so many parameters."""
ENOUGH_KV, MOST_KV = 0.2, 0.4
"""Shares of a GPU for keys and values: with less the engine waits, more is not taken."""
WAYS = (
    ("train.token_budget=0",), ("model.gradient_checkpointing=auto",), ("train.optimizer=adamw-8bit",),
    ("train.optimizer.offload=true",), ("model.lora={r: 32}",), ("model.lora={r: 32}", "model.quantize=4bit"),
)  # fmt: skip
"""What needs less memory, the mildest first."""
GIB = 1 << 30


def device_bytes(config: PolicyConfig) -> int:
    """Bytes of the policy's device that can be had; 0 on the CPU, where nothing is planned."""
    if config.memory_gb:  # also for a device that is not here
        return int(config.memory_gb * GIB)
    device = torch.device(pick_device(config.device))
    if device.type != "cuda":
        return 0
    return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)


def plan_recipe(recipe: Recipe, words: int = 0, processes: int = 1) -> MemoryPlan | None:
    """The plan of a run that is not loaded, on a GPU if `model.memory_gb` says so; None where the model's config.json
    is not on this machine. `words`: the vocabulary of a new tiny model."""
    model = recipe.model
    config = find_config(model.path) if model.path else tiny_config(model.tiny, words)
    if config is None:
        return None
    total = device_bytes(model)
    size = {"float32": 4, "bfloat16": 2, "auto": 2 if total else 4}[model.dtype]
    return plan_of(job_of(recipe, ModelShape.of(config), size, processes=processes), total)


def plan_loaded(recipe: Recipe, module: Any, config: TrainConfig, processes: int = 1) -> MemoryPlan:
    """The plan of a phase of a run whose model is loaded, for each of `processes` ranks; a micro-batch is measured."""
    size, total = module.get_input_embeddings().weight.element_size(), device_bytes(recipe.model)
    job = job_of(recipe, ModelShape.of(module.config), size, config, processes)
    if module.device.type == "cuda":
        job = job_of(recipe, job.shape, size, config, processes, measure_kept(module, job.drops))
    return plan_of(job, total)


def plan_of(job: MemoryJob, total: int) -> MemoryPlan:
    """The plan for a device of `total` bytes (0: not limited); `UserError` with arithmetic and way out if none fits."""
    recipe, again = job.recipe, job.recipe.model.gradient_checkpointing
    if again == "mlp" and not job.thin:
        raise UserError(
            "model.gradient_checkpointing=mlp needs a model whose blocks the learner computes itself, with adapters of "
            "kind lora, and no exact, dropout or quantize; set block"
        )
    if not total:  # on the CPU nothing is chosen: what the recipe says, and the engine's own sizes
        setting = MemorySetting(job.config.token_budget or WITHOUT_PLAN, "none" if again == "auto" else again)
        return MemoryPlan(setting, 0, {}, (), 0)
    limit = usable(total)
    if plan := choose(job, limit):
        return plan

    def fits(other: Recipe) -> bool:
        return choose(job_of(other, job.shape, job.size, None, job.processes, job.measured), limit) is not None

    ways = [text for text, other in changes(recipe) if fits(other)][:3]
    lengths, model = range(256, job.longest, 256), recipe.model
    shorter = [recipe.model_copy(update={"model": model.model_copy(update={"max_context": n})}) for n in lengths]
    if count := bisect_left(shorter, True, key=lambda other: not fits(other)):
        ways.append(f"model.max_context={lengths[count - 1]} (the longest that fits)")
    nearest = min((make_plan(job, setting, job.least) for setting in list_settings(job)), key=lambda plan: plan.peak)
    phase = "learning" if nearest.learning >= nearest.sampling else "sampling"
    sizes = [(part.name, getattr(part, phase)) for part in nearest.parts]
    terms = " + ".join(f"{name} {size / GIB:.1f}" for name, size in sizes if size >= GIB // 20)
    way_out = "no setting makes it fit: take a smaller model or a larger device"
    raise UserError(
        f"the run, with sequences of up to {job.longest} tokens, does not fit into {limit / GIB:.1f} GiB of the "
        f"device: {terms} = {nearest.peak / GIB:.1f} GiB while {phase}; "
        + (f"it would with {', or '.join(ways)}" if ways else way_out)
    )


def changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """What a user could set to need less, the mildest first, and the recipe with it."""
    written = recipe.model_dump(mode="json", exclude_defaults=True)
    for way in WAYS:
        overrides = [each for each in way if not (recipe.model.lora and each.startswith("model.lora"))]
        changed = load_recipe(written, overrides).recipe
        if changed != recipe:
            yield " ".join(overrides), changed
    if recipe.models:
        yield "helper models elsewhere (models.NAME.device, or a url)", recipe.model_copy(update={"models": {}})


def choose(job: MemoryJob, limit: int) -> MemoryPlan | None:
    """The fastest settings that fit into `limit` bytes, with the rest for keys and values; None: nothing does.

    First with keys and values enough to keep the engine busy, else with those that it cannot do without.
    """
    enough = max(min(job.wanted, int(ENOUGH_KV * limit) // job.all_kv), job.least)
    settings = sorted(list_settings(job), key=lambda setting: cost(job, setting))
    for tokens in dict.fromkeys((enough, job.least)):
        for setting in settings:
            if make_plan(job, setting, tokens, limit).peak <= limit:
                return widen(job, setting, tokens, limit)
    return None


def widen(job: MemoryJob, setting: MemorySetting, tokens: int, limit: int) -> MemoryPlan:
    """The plan of settings that fit: no more layers computed again than needed, and then as many keys and values."""

    def over(setting: MemorySetting, tokens: int) -> bool:
        return make_plan(job, setting, tokens, limit).peak > limit

    if job.thin and setting.checkpointing != "none" and job.recipe.model.gradient_checkpointing == "auto":
        kinds = [replace(setting, layers=layers) for layers in range(job.shape.layers, 0, -1)]
        setting = kinds[bisect_left(kinds, True, key=lambda kind: over(kind, tokens)) - 1]
    sizes = range(tokens, max(min(job.wanted, int(MOST_KV * limit) // job.all_kv), tokens) + 1)
    return make_plan(job, setting, sizes[bisect_left(sizes, True, key=lambda size: over(setting, size)) - 1], limit)


def cost(job: MemoryJob, setting: MemorySetting) -> float:
    """How long a step takes, in steps with everything in memory, by rule of thumb: half of it sampling, half learning.

    Computing blocks again is a third more learning, the way up of their MLPs half of that; a micro-batch reads all
    weights; a parked engine captures its steps again and fills its pages anew; called adapters sample at half speed;
    helpers wait for each other, and those that left come back.
    """
    learn = (1 + 1024 / setting.tokens) * {"none": 1, "mlp": 7 / 6, "block": 4 / 3}[setting.checkpointing]
    sample = {"copy": 1.0, "in place": 1.02, "never": 2.0}[setting.merge] + 0.1 * setting.park
    return learn + sample * job.samples + {"stay": 0.0, "swap": 0.4, "leave": 0.5}[setting.helpers]


def list_settings(job: MemoryJob) -> Iterator[MemorySetting]:
    """What can be chosen."""
    model, overlaps = job.recipe.model, job.config.async_steps > 0
    again: list[Any] = [model.gradient_checkpointing]
    if again == ["auto"]:
        again = ["none", *(["mlp"] if job.thin else []), "block"]
    merges: list[Any] = ["copy"]
    if model.lora and job.samples and not job.narrow:
        merges += ["in place", "never"] if job.lends else ["never"]
    # An engine that samples while the learner works is not parked, and is lent nothing.
    pauses = (False, True) if job.samples and not overlaps else (False,)
    turns: Any = ("stay", "swap", "leave")[: (2 if overlaps else 3) if job.swappable else 1]
    budget, least = job.config.token_budget, max(job.longest, min(SIZES[-1], job.shape.context or SIZES[-1]))
    most = SIZES[0] if job.shape.parameters < SMALL else BUSY
    # A micro-batch is never smaller than the longest sequence.
    tokens = [max(budget, job.longest)] if budget else [*(size for size in SIZES if most >= size > least), least]
    for merge, kind, park, helpers, size in product(merges, again, pauses, turns, tokens):
        if merge != "in place" or park:  # while the learner works its weights are its own
            yield MemorySetting(size, kind, None, merge, park, helpers)


def job_of(
    recipe: Recipe, shape: ModelShape, size: int, config: TrainConfig | None = None, processes: int = 1,
    measured: int = 0,
) -> MemoryJob:  # fmt: skip
    """The job of a recipe; `size`: bytes of one of the model's numbers, `config`: the phase's."""
    config = config or recipe.train
    helpers = tuple(_helpers(recipe, shape, size)) if config.samples else ()
    return MemoryJob(recipe, shape, size, config, helpers, processes, measured)


def _helpers(recipe: Recipe, policy: ModelShape, size: int) -> Iterator[HelperModel]:
    """Helper models on the policy's device, and frozen copies of it."""
    ahead = {f"ahead-{n}": ModelSpec(model="policy@1") for n in range(recipe.train.async_steps)}
    seen: list[ModelSpec] = []
    for name, spec in (named_models(recipe) | ahead).items():
        if spec.kind == "policy" and "@" in spec.model:
            when, lora, narrow = spec.model.partition("@")[2], recipe.model.lora, recipe.model.engine.weights == "fp8"
            weights = policy.parameters * size
            if lora is not None:  # what is not trained is shared; a new adapter adds nothing to what is shared
                weights = sum(policy.adapters(lora)) * 4 + policy.merged(lora, narrow) * size * (when != "start")
            kv = policy.kv_numbers * (1 if recipe.model.engine.kv == "fp8" else size)
            sizes = weights + policy.projections * narrow, sum(step_bytes(policy, size)), kv
            for number in range(states_at_once(int(when), len(ahead)) if when.isdigit() and name not in ahead else 1):
                yield HelperModel(f"{name} ({number})" if number else name, *sizes, copy=True)
        elif is_beside(spec, recipe) and spec not in seen:  # roles with the same spec share one (models/connect.py)
            seen.append(spec)
            if (found := find_config(spec.model)) is not None:
                shape, each = ModelShape.of(found), 4 if spec.dtype == "float32" else size
                pages = int(spec.kv_gb * GIB)
                kv = 0 if pages else shape.kv_numbers * (1 if spec.kv == "fp8" else each)
                weights = shape.parameters * each - shape.projections * (each - 1) * (spec.weights == "fp8")
                yield HelperModel(name, weights, sum(step_bytes(shape, each)), kv, pages=pages)


def is_beside(spec: ModelSpec, recipe: Recipe) -> bool:
    """Whether a helper model shares the policy's device."""
    return spec.kind == "local" and spec.device in ("auto", recipe.model.device)


def named_models(recipe: Recipe) -> dict[str, ModelSpec]:
    """Helper models by name: those of `models` that are asked, and copies of the policy that classmates are."""
    copies = (name for name in classmate_names(recipe.futures) if name.startswith("policy@"))
    return recipe.needed_models | {name: ModelSpec(model=name) for name in copies}


def measure_kept(module: Any, noise: bool = False, allocated: Callable[[], int] = torch.cuda.memory_allocated) -> int:
    """Bytes that a token keeps in all layers; 0 where that cannot be measured. `noise`: dropout is drawn."""
    before, words = checkpointing_of(module), min(64, module.get_input_embeddings().weight.shape[0])

    def kept(tokens: int) -> int:
        batch = pack([Datum([i % words for i in range(tokens)], [0, *[1] * (tokens - 1)])], module.device)
        forward, empty = PackedForward(module, states_of(module)[0]()), allocated()
        with nullcontext(module.train()) if noise else without_dropout(module), forward.open():
            hidden = forward.rows(batch)
            after = allocated()
            del hidden
        return after - empty

    try:
        set_checkpointing(module, "none")  # an earlier phase's choice would keep little
        with at_rest(module):
            # Two lengths, so that what does not grow with them (workspaces) drops out; the first run warms up.
            _, short, long = (kept(tokens) for tokens in (256, 256, 512))
        return max(0, long - short) // 256
    except (*FAILURES, torch.OutOfMemoryError):
        return 0  # the learner has other forwards to try, and arithmetic refuses what does not fit
    finally:
        set_checkpointing(module, *before)


def configure_learner(config: TrainConfig, plan: MemoryPlan, module: Any) -> TrainConfig:
    """The phase's configuration with the plan's micro-batches; the module computes again what the plan says."""
    set_checkpointing(module, plan.setting.checkpointing, plan.setting.layers)
    return config.model_copy(update={"token_budget": config.token_budget or plan.setting.tokens})


def configure_helpers(recipe: Recipe, plan: MemoryPlan) -> Recipe:
    """The recipe with the plan's keys and values for helper models on the policy's device."""
    first: dict[str, str] = {}
    models = {}
    for name, spec in recipe.models.items():  # roles with the same spec share one model, that of the first
        kv = plan.helper_kv.get(first.setdefault(spec.model_dump_json(), name), 0)
        planned = spec.kind == "local" and not spec.kv_gb and kv
        models[name] = spec.model_copy(update={"kv_gb": kv / GIB}) if planned else spec
    return recipe.model_copy(update={"models": models})


def kv_of_copies(recipe: Recipe, plan: MemoryPlan) -> dict[str, int]:
    """Bytes for keys and values of each frozen copy of the policy, by what follows the @ of its name."""
    copies = {name: spec.model.partition("@")[2] for name, spec in named_models(recipe).items() if "@" in spec.model}
    copies |= {name: name for name in plan.helper_kv if name.startswith("ahead-")}
    return {when: plan.helper_kv.get(name, 0) for name, when in copies.items()}


def table(plan: MemoryPlan) -> str:
    """Each part at both peaks, the helpers' places and what was chosen."""
    setting, lines = plan.setting, list[str]()
    unit, word = (GIB, "GiB") if plan.peak >= GIB else (GIB >> 10, "MiB")
    if plan.limit:
        lines.append(f"{f'memory, {word}':<17} {'sampling':>9} {'learning':>9}")
        whole = MemoryPart("together", plan.sampling, plan.learning, f"of {plan.limit / GIB:.1f} that can be used")
        for part in (*plan.parts, whole):
            sizes = f"{part.sampling / unit:9.2f} {part.learning / unit:9.2f}"
            lines.append(f"  {part.name:<15} {sizes}  {part.why}".rstrip())
    for region in plan.layout.regions if plan.layout else ():
        rivals = ", ".join(plan.layout.rivals(region.name)) if plan.layout else ""
        lines.append(f"  {region.name:<15} {region.start / unit:.2f} to {region.stop / unit:.2f} of the arena")
        lines[-1] += f", in turn with {rivals}" if rivals else ""
    again = {"none": "nothing", "mlp": "the way up of every MLP", "block": "each block"}[setting.checkpointing]
    layers = "" if setting.layers is None else f" of the first {setting.layers} layers"
    lines.append(f"micro-batch  {setting.tokens} tokens, {again}{layers} is computed again on the way back")
    if plan.kv_bytes:
        rest = "gives its memory back while the learner works" if setting.park else "keeps its memory"
        adapters = {"copy": "", "in place": "; adapters are merged in place", "never": "; adapters are not merged"}
        lines.append(f"engine       {plan.kv_bytes / GIB:.1f} GiB for keys and values; {rest}{adapters[setting.merge]}")
    if plan.layout is not None:
        pairs = ", ".join(f"{a} and {b}" for a, b in plan.layout.conflicts)
        leave = "; they leave while the learner works" if setting.helpers == "leave" else ""
        lines.append(f"helpers      {f'never together: {pairs}' if pairs else 'all together while they sample'}{leave}")
    if host := sum(part.host for part in plan.parts):
        lines.append(f"host         {host / GIB:.1f} GiB beside the program")
    return "\n".join(lines)
