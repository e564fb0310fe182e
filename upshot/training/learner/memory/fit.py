"""From a recipe to its memory plan: the fastest settings that fit, or why none do and what would help; and its use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from upshot.config.load import load_recipe
from upshot.config.recipe import PolicyConfig, Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.models.local import find_config, pick_device
from upshot.models.tiny import tiny_config
from upshot.training.learner.batch import WITHOUT_PLAN
from upshot.training.learner.forward.measure import measure_kept
from upshot.training.learner.forward.select import set_checkpointing
from upshot.training.learner.memory.plan import GIB, MemoryJob, MemoryPlan, MemorySetting, make_plan, usable
from upshot.training.learner.memory.shape import ModelShape

SIZES, BUSY, SMALL = (32768, 16384, 8192, 4096, 2048, 1024), 8192, 500_000_000
"""Tokens of a micro-batch to try; how many keep a GPU busy with a model of more than so many parameters."""
ENOUGH_KV, MOST_KV = 0.2, 0.4
"""Shares of a GPU for keys and values: with less the engine waits, more is not taken."""
WAYS = (
    ("train.token_budget=0",), ("model.gradient_checkpointing=auto",), ("train.optimizer=adamw-8bit",),
    ("train.optimizer.offload=true",), ("model.lora={r: 32}",), ("model.lora={r: 32}", "model.quantize=4bit"),
)  # fmt: skip
"""What needs less memory, the mildest first."""


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
    config = find_config(model.path, offline=True) if model.path else tiny_config(model.tiny, words)
    if config is None:
        return None
    total = device_bytes(model)
    size = {"float32": 4, "bfloat16": 2, "auto": 2 if total else 4}[model.dtype]
    return plan_of(MemoryJob(recipe, ModelShape(config), size, processes=processes), total)


def plan_loaded(recipe: Recipe, module: Any, config: TrainConfig, processes: int = 1) -> MemoryPlan:
    """The plan of a phase of a run whose model is loaded, for each of `processes` ranks; a micro-batch is measured."""
    size, total = module.get_input_embeddings().weight.element_size(), device_bytes(recipe.model)
    job = MemoryJob(recipe, ModelShape(module.config), size, config, processes)
    if module.device.type == "cuda":
        job = MemoryJob(recipe, job.shape, size, config, processes, measure_kept(module, job.drops))
    return plan_of(job, total)


def plan_of(job: MemoryJob, total: int) -> MemoryPlan:
    """The plan for a device of `total` bytes (0: not limited); `UserError` with arithmetic and way out if none fits."""
    again = job.recipe.model.gradient_checkpointing
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
    ways = list_ways(job, limit)
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


def list_ways(job: MemoryJob, limit: int) -> list[str]:
    """What a user could set so that the run fits: at most three settings, the mildest first, and a shorter context."""
    recipe, model = job.recipe, job.recipe.model

    def fits(other: Recipe) -> bool:
        changed = MemoryJob(other, job.shape, job.size, None, job.processes, job.measured)
        return choose(changed, limit) is not None

    ways, written = list[str](), recipe.model_dump(mode="json", exclude_defaults=True)
    for way in WAYS:
        overrides = [each for each in way if not (model.lora and each.startswith("model.lora"))]
        other = load_recipe(written, overrides).recipe
        if other != recipe and len(ways) < 3 and fits(other):
            ways.append(" ".join(overrides))
    if recipe.models and len(ways) < 3 and fits(recipe.model_copy(update={"models": {}})):
        ways.append("helper models elsewhere (models.NAME.device, or a url)")
    lengths = range(256, job.longest, 256)
    shorter = last_of(
        lengths, lambda n: fits(recipe.model_copy(update={"model": model.model_copy(update={"max_context": n})}))
    )
    return [*ways, f"model.max_context={shorter} (the longest that fits)"] if shorter else ways


def last_of(values: range, fits: Callable[[int], bool]) -> int | None:
    """The last of the values that fits, if all before it do; None: the first does not."""
    count = bisect_left(values, True, key=lambda value: not fits(value))
    return values[count - 1] if count else None


def choose(job: MemoryJob, limit: int) -> MemoryPlan | None:
    """The fastest settings that fit into `limit` bytes, with the rest for keys and values; None: nothing does.

    First with keys and values enough to keep the engine busy, else with those that it cannot do without.
    """

    def fits(setting: MemorySetting, tokens: int) -> bool:
        return make_plan(job, setting, tokens, limit).peak <= limit

    enough, most = (max(min(job.wanted, int(share * limit) // job.all_kv), job.least) for share in (ENOUGH_KV, MOST_KV))
    settings = sorted(list_settings(job), key=lambda setting: cost(job, setting))
    fitting = ((setting, tokens) for tokens in (enough, job.least) for setting in settings if fits(setting, tokens))
    fastest, tokens = next(fitting, (None, 0))
    if fastest is None:
        return None
    setting = fastest
    # No more layers computed again than needed, and then as many keys and values as there is room for.
    if job.thin and setting.checkpointing != "none" and job.recipe.model.gradient_checkpointing == "auto":
        counts = range(job.shape.layers, 0, -1)
        setting = replace(setting, layers=last_of(counts, lambda count: fits(replace(fastest, layers=count), tokens)))
    more = last_of(range(tokens, most + 1), lambda more: fits(setting, more))
    return make_plan(job, setting, more or tokens, limit)


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
        again = ["none", "mlp", "block"] if job.thin else ["none", "block"]
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


def configure_learner(config: TrainConfig, plan: MemoryPlan, module: Any) -> TrainConfig:
    """The phase's configuration with the plan's micro-batches; the module computes again what the plan says."""
    set_checkpointing(module, plan.setting.checkpointing, plan.setting.layers)
    return config.model_copy(update={"token_budget": config.token_budget or plan.setting.tokens})


def configure_helpers(recipe: Recipe, plan: MemoryPlan) -> Recipe:
    """The recipe with the plan's keys and values for helper models; roles with the same spec share one model."""
    planned = [(recipe.models[name], kv / GIB) for name, kv in plan.helper_kv.items() if name in recipe.models and kv]
    sized = {
        role: spec.model_copy(update={"kv_gb": gib})
        for role, spec in recipe.models.items() for planned_spec, gib in planned if spec == planned_spec
    }  # fmt: skip
    return recipe.model_copy(update={"models": recipe.models | sized})


def kv_of_copies(plan: MemoryPlan) -> dict[str, int]:
    """Bytes for keys and values of each frozen copy of the policy, by what follows the @ of its name."""
    return {name.partition("@")[2]: kv for name, kv in plan.helper_kv.items() if name.startswith("policy@")}
