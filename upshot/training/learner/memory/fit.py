"""From a recipe to its memory plan: the fastest settings that fit, or why none do and what would help."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any

from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.models.local import find_config, free_bytes, pick_dtype
from upshot.models.tiny import tiny_config
from upshot.training.learner.batch import WITHOUT_PLAN
from upshot.training.learner.forward.measure import measure_kept
from upshot.training.learner.memory.plan import GIB, MemoryJob, MemoryPlan, MemorySetting, make_plan, usable
from upshot.training.learner.memory.shape import shape_of

SIZES = (32768, 16384, 8192, 4096, 2048, 1024)  # tokens of a micro-batch to try
SMALL, BUSY = 500_000_000, 8192  # a model with more parameters than SMALL keeps a GPU busy with BUSY tokens
ENOUGH_KV, MOST_KV = 0.2, 0.4  # shares of a GPU for keys and values: with less the engine waits, more is not taken
WAYS = (  # what needs less memory, the mildest first
    ("train.token_budget=0",), ("model.gradient_checkpointing=auto",), ("train.optimizer=adamw-8bit",),
    ("train.optimizer.offload=true",), ("model.lora={r: 32}",), ("model.lora={r: 32}", "model.quantize=4bit"),
)  # fmt: skip


def plan_recipe(recipe: Recipe, words: int = 0, processes: int = 1) -> MemoryPlan | None:
    """The plan of a run that is not loaded; None: its config.json is not here. `words`: those of a new tiny model."""
    model = recipe.model
    config = find_config(model.path, offline=True) if model.path else tiny_config(model.tiny, words)
    if config is None:
        return None
    total = int(model.memory_gb * GIB) or free_bytes(model.device)
    size = pick_dtype(model.dtype, "cuda" if total else "cpu").itemsize
    return plan_of(MemoryJob(recipe, shape_of(config), size, processes=processes), total)


def plan_loaded(recipe: Recipe, module: Any, config: TrainConfig, processes: int = 1) -> MemoryPlan:
    """The plan of a phase of a run whose model is loaded, for each of `processes` ranks; a micro-batch is measured."""
    shape, size = shape_of(module.config), module.get_input_embeddings().weight.element_size()
    if module.device.type == "cuda":
        shape.measured = measure_kept(module, MemoryJob(recipe, shape, size, config).drops)
    total = int(recipe.model.memory_gb * GIB) or free_bytes(recipe.model.device)
    return plan_of(MemoryJob(recipe, shape, size, config, processes), total)


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
    nearest = min((make_plan(job, setting, job.least) for setting in list_settings(job)), key=lambda plan: plan.peak)
    phase = "learning" if nearest.learning >= nearest.sampling else "sampling"
    terms = " + ".join(f"{p.name} {gib:.1f}" for p in nearest.parts if (gib := getattr(p, phase) / GIB) >= 0.05)
    ways = ", or ".join(list_ways(job, limit))
    raise UserError(
        f"the run, with sequences of up to {job.longest} tokens, does not fit into {limit / GIB:.1f} GiB of the "
        f"device: {terms} = {nearest.peak / GIB:.1f} GiB while {phase}; "
        + (f"it fits with {ways}" if ways else "no setting makes it fit: take a smaller model or a larger device")
    )


def list_ways(job: MemoryJob, limit: int) -> list[str]:
    """What a user could set so that the run fits: at most three settings, the mildest first, and a shorter context."""
    recipe, model = job.recipe, job.recipe.model
    written = recipe.model_dump(mode="json", exclude_defaults=True)
    of_phase = {name: value for name, value in job.config if value != getattr(recipe.train, name)}

    def fits(other: Recipe) -> bool:
        changed = MemoryJob(other, job.shape, job.size, other.train.model_copy(update=of_phase), job.processes)
        return other != recipe and choose(changed, limit) is not None

    def fits_with(context: int) -> bool:
        return fits(recipe.model_copy(update={"model": model.model_copy(update={"max_context": context})}))

    words = [[each for each in way if not (model.lora and each.startswith("model.lora"))] for way in WAYS]
    others = {" ".join(overrides): load_recipe(written, overrides).recipe for overrides in words}
    others["helper models elsewhere (models.NAME.device, or a url)"] = recipe.model_copy(update={"models": {}})
    ways = list(islice((way for way, other in others.items() if fits(other)), 3))
    shorter = last_of(range(256, job.longest, 256), fits_with)
    return [*ways, f"model.max_context={shorter} (the longest that fits)"] if shorter else ways


def last_of(values: range, fits: Callable[[int], bool]) -> int | None:
    """The last of the values that fits, if all before it do; None: the first does not."""
    count = bisect_left(values, True, key=lambda value: not fits(value))
    return values[count - 1] if count else None


def choose(job: MemoryJob, limit: int) -> MemoryPlan | None:
    """The fastest settings that fit into `limit` bytes, with the rest for keys and values; None: nothing does."""

    def fits(setting: MemorySetting, tokens: int) -> bool:
        return make_plan(job, setting, tokens, limit).peak <= limit

    aims = (job.wanted, ENOUGH_KV), (job.useful, MOST_KV)
    enough, most = (max(min(tokens, int(share * limit) // job.all_kv), job.least) for tokens, share in aims)
    settings = sorted(list_settings(job), key=lambda setting: cost(job, setting))
    # With keys and values enough to keep the engine busy, else with those that it cannot do without.
    fitting = ((setting, tokens) for tokens in (enough, job.least) for setting in settings if fits(setting, tokens))
    if (found := next(fitting, None)) is None:
        return None
    setting, tokens = found
    # No more layers computed again than needed, and then as many keys and values as there is room for.
    if job.thin and setting.checkpointing != "none" and job.recipe.model.gradient_checkpointing == "auto":
        counts = range(job.shape.layers, 0, -1)
        setting = replace(setting, layers=last_of(counts, lambda count: fits(replace(found[0], layers=count), tokens)))
    more = last_of(range(tokens, most + 1), lambda more: fits(setting, more))
    return make_plan(job, setting, more or tokens, limit)


def cost(job: MemoryJob, setting: MemorySetting) -> float:
    """How long a step takes, by rule of thumb; with everything in memory learning takes 1 and sampling 1."""
    learn = (1 + 1024 / setting.tokens) * {"none": 1, "mlp": 7 / 6, "block": 4 / 3}[setting.checkpointing]
    sample = {"copy": 1.0, "in place": 1.02, "never": 2.0}[setting.merge] + 0.1 * setting.park
    return learn + sample * job.samples + {"stay": 0.0, "swap": 0.4, "leave": 0.5}[setting.helpers]


def list_settings(job: MemoryJob) -> Iterator[MemorySetting]:
    """What can be chosen; a micro-batch is never smaller than the longest sequence."""
    model, overlaps = job.recipe.model, job.config.async_steps > 0
    again: list[Any] = [model.gradient_checkpointing]
    if again == ["auto"]:
        again = ["none", "mlp", "block"] if job.thin else ["none", "block"]
    alone = job.swappable == job.helpers and model.quantize == "none"  # nobody else reads the weights, as they are
    merges: list[Any] = ["copy", *["in place"] * alone, "never"] if job.merged and not job.narrow else ["copy"]
    # An engine that samples while the learner works is not parked, and is lent nothing.
    pauses = (False, True) if job.samples and not overlaps else (False,)
    turns: Any = ("stay", "swap", "leave")[: (2 if overlaps else 3) if job.swappable else 1]
    budget, least = job.config.token_budget, max(job.longest, min(SIZES[-1], job.shape.context or SIZES[-1]))
    most = SIZES[0] if job.shape.parameters < SMALL else BUSY
    tokens = [max(budget, job.longest)] if budget else [*(size for size in SIZES if most >= size > least), least]
    for merge, kind, park, helpers, size in product(merges, again, pauses, turns, tokens):
        if merge != "in place" or park:  # while the learner works its weights are its own
            yield MemorySetting(size, kind, None, merge, park, helpers)
