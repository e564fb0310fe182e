"""From a recipe to its memory plan, or to why nothing fits and what would; what engine and learner get of the plan."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from upshot.config.load import load_recipe
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import PolicyConfig, Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.engine.engine import EngineSettings
from upshot.engine.llama.agreement import FAILURES
from upshot.models.local import local_path, pick_device
from upshot.models.tiny import tiny_config
from upshot.rollout.futures.classmates.map_file import classmate_names
from upshot.serving.swap.pool import ModelPool
from upshot.training.learner.batch import WITHOUT_PLAN, Datum, pack
from upshot.training.learner.forward.dropout import without_dropout
from upshot.training.learner.forward.packed import PackedForward
from upshot.training.learner.forward.select import at_rest, checkpointing_of, set_checkpointing, states_of
from upshot.training.learner.memory.choice import choose, find_nearest
from upshot.training.learner.memory.plan import (
    HelperModel,
    MemoryJob,
    MemoryPlan,
    MemorySetting,
    draws_dropout,
    parts_of,
    step_bytes,
    usable,
)
from upshot.training.learner.memory.shape import ModelShape, find_config
from upshot.training.learner.memory.table import arithmetic
from upshot.training.snapshots import states_at_once

PROVIDER = re.compile(r"[a-z0-9_]+/")
"""How names of models at providers begin; those of the hub begin with whoever made them."""
TOKENS = 256
"""Of the micro-batch that is measured."""
PAGES = 512 << 20
"""Bytes of an engine's keys and values on the CPU."""
GPU_PARTS = ("captured steps", "engine's step")
WITH_ALL_WEIGHTS = (
    ("train.optimizer=adamw-8bit",),
    ("train.optimizer.offload=true",),
    ("model.lora={r: 32}",),
    ("model.lora={r: 32}", "model.quantize=4bit"),
)
"""What needs less than training all weights does, the mildest first."""


def device_bytes(config: PolicyConfig) -> int:
    """Bytes of the policy's device that can be had; 0 on the CPU, where nothing is planned."""
    if config.memory_gb:  # also for a device that is not here
        return int(config.memory_gb * 2**30)
    device = torch.device(pick_device(config.device))
    if device.type != "cuda":
        return 0
    return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)


def device_total(config: PolicyConfig) -> int:
    """Bytes that the policy's GPU has in all."""
    return int(torch.cuda.get_device_properties(torch.device(pick_device(config.device))).total_memory)


def plan_recipe(recipe: Recipe, words: int = 0, processes: int = 1) -> MemoryPlan | None:
    """The plan of a run that is not loaded; None where the model's config.json is not on this machine.

    `words`: the vocabulary of a new tiny model. Memory given by number (`model.memory_gb`) is taken for a GPU's, so
    that a recipe can be planned where there is none.
    """
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
    measured = measure_kept(module, draws_dropout(recipe, config)) if module.device.type == "cuda" else 0
    return plan_of(job_of(recipe, ModelShape.of(module.config), size, config, processes, measured), total)


def plan_of(job: MemoryJob, total: int) -> MemoryPlan:
    """The plan for a device of `total` bytes (0: not limited); `UserError` with arithmetic and way out if none fits."""
    recipe, again = job.recipe, job.recipe.model.gradient_checkpointing
    if again == "mlp" and not job.thin:
        raise UserError(
            "model.gradient_checkpointing=mlp needs a model whose blocks the learner computes itself, with adapters of "
            "kind lora, and no exact, dropout or quantize; take block"
        )
    if not total:
        # On the CPU nothing is chosen: what the recipe says, and the engine's own sizes.
        setting = MemorySetting(job.config.token_budget or WITHOUT_PLAN, "none" if again == "auto" else again)
        job = replace(job, helpers=tuple(replace(helper, step=0) for helper in job.helpers))
        parts = parts_of(job, setting, PAGES * job.samples, PAGES * len(job.helpers))
        return MemoryPlan(setting, 0, {}, tuple(p for p in parts if p.name not in GPU_PARTS), 0, helpers=job.helpers)
    limit = usable(total)

    def fits(other: Recipe) -> bool:
        return choose(job_of(other, job.shape, job.size, None, job.processes, job.measured), limit) is not None

    if plan := choose(job, limit):
        return plan
    ways = [text for text, other in changes(recipe) if fits(other)]
    lengths, model = range(256, job.longest, 256), recipe.model
    shorter = [recipe.model_copy(update={"model": model.model_copy(update={"max_context": n})}) for n in lengths]
    count = bisect_left(shorter, True, key=lambda other: not fits(other))
    ways = ways[:3] + ([f"model.max_context={lengths[count - 1]} (the longest that fits)"] if count else [])
    way_out = f"it would with {', or '.join(ways)}" if ways else "no setting makes it fit: take a smaller model"
    raise UserError(
        f"the run, with sequences of up to {job.longest} tokens, does not fit into {limit / 2**30:.1f} GiB of the "
        f"device: {arithmetic(find_nearest(job, limit))}; {way_out}{'' if ways else ' or a larger device'}"
    )


def changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """What a user could set to need less, the mildest first, and the recipe with it."""
    written = recipe.model_dump(mode="json", exclude_defaults=True)
    milder = (("train.token_budget=0",), ("model.gradient_checkpointing=auto",))
    for overrides in (*milder, *([("model.quantize=4bit",)] if recipe.model.lora else WITH_ALL_WEIGHTS)):
        changed = load_recipe(written, overrides).recipe
        if changed != recipe:
            yield " ".join(overrides), changed
    if recipe.models:
        yield "helper models elsewhere (models.NAME.device, or a url)", recipe.model_copy(update={"models": {}})


def job_of(
    recipe: Recipe, shape: ModelShape, size: int, config: TrainConfig | None = None, processes: int = 1,
    measured: int = 0,
) -> MemoryJob:  # fmt: skip
    """The job of a recipe; `size`: bytes of one of the model's numbers, `config`: the phase's."""
    config = config or recipe.train
    helpers = tuple(_helpers(recipe, shape, size)) if config.samples else ()
    return MemoryJob(recipe, config, shape, size, helpers, processes, measured)


def _helpers(recipe: Recipe, policy: ModelShape, size: int) -> Iterator[HelperModel]:
    """Helper models on the policy's device, and frozen copies of it."""
    ahead = {f"ahead-{n}": ModelSpec(model="policy@1") for n in range(recipe.train.async_steps)}
    seen: list[ModelSpec] = []
    for name, spec in (named_models(recipe) | ahead).items():
        if spec.kind == "policy" and "@" in spec.model:
            when, lora, narrow = spec.model.partition("@")[2], recipe.model.lora, recipe.model.engine.weights == "fp8"
            weights = policy.parameters * size
            if lora is not None:  # what is not trained is shared; a new adapter adds nothing to what is shared
                weights = sum(policy.adapters(lora)) * 4
                weights += policy.merged(lora, narrow) * size if when != "start" else 0
            weights += policy.projections if narrow else 0
            kv = policy.kv_numbers * (1 if recipe.model.engine.kv == "fp8" else size)
            states = states_at_once(int(when), len(ahead)) if when.isdigit() and name not in ahead else 1
            for number in range(states):
                label = f"{name} ({number})" if number else name
                yield HelperModel(label, weights, sum(step_bytes(policy, size)), kv, copy=True)
        elif spec.kind == "local" and spec not in seen:  # roles with the same spec share one model (models/connect.py)
            seen.append(spec)
            config = find_config(spec.model) if is_beside(spec, recipe) else None
            if config is not None:
                shape, each = ModelShape.of(config), 4 if spec.dtype == "float32" else size
                pages = int(spec.kv_gb * 2**30)
                kv = 0 if pages else shape.kv_numbers * (1 if spec.kv == "fp8" else each)
                saved = shape.projections * (each - 1) if spec.weights == "fp8" else 0
                yield HelperModel(name, shape.parameters * each - saved, sum(step_bytes(shape, each)), kv, pages=pages)


def is_beside(spec: ModelSpec, recipe: Recipe) -> bool:
    """Whether a helper model shares the policy's device."""
    return spec.kind == "local" and spec.device in ("auto", recipe.model.device)


def require_sizes(recipe: Recipe) -> None:
    """Have the config.json of every helper model on the policy's device here; `UserError` where one cannot be had."""
    for name, spec in named_models(recipe).items():
        if spec.kind == "provider" and not PROVIDER.match(spec.model):
            raise UserError(
                f"models.{name}={spec.model} would be looked up at a provider called "
                f"'{spec.model.partition('/')[0]}'; for a hub model here, set models.{name}=local:{spec.model}"
            )
        if not is_beside(spec, recipe) or find_config(spec.model) is not None:
            continue
        from huggingface_hub import hf_hub_download

        path = local_path(spec.model)
        try:
            hf_hub_download(path, "config.json")
        except Exception as error:  # no such name, no network, no permission: in all cases its size is not known
            raise UserError(
                f"models.{name}: the size of '{spec.model}' is not known: its config.json is not on this machine and "
                f"cannot be fetched ({type(error).__name__}); name a folder, or: hf download {path} config.json"
            ) from error


def named_models(recipe: Recipe) -> dict[str, ModelSpec]:
    """Helper models by name: those of `models` that are asked, and copies of the policy that classmates are."""
    copies = (name for name in classmate_names(recipe.futures) if name.startswith("policy@"))
    return recipe.needed_models | {name: ModelSpec(model=name) for name in copies}


def measure_kept(module: Any, noise: bool = False, allocated: Callable[[], int] = torch.cuda.memory_allocated) -> int:
    """Bytes that a token keeps in all layers; 0 where that cannot be measured. `noise`: dropout is drawn."""
    before = checkpointing_of(module)  # an earlier phase's choice, with which little would be kept
    try:
        set_checkpointing(module, "none")
        # Two lengths, so that what does not grow with them (workspaces, tables) drops out; the first run warms up.
        _, short, long = (_kept(module, tokens, noise, allocated) for tokens in (TOKENS, TOKENS, 2 * TOKENS))
        return max(0, long - short) // TOKENS
    except (*FAILURES, torch.OutOfMemoryError):
        return 0  # the learner has other forwards to try, and arithmetic refuses what does not fit
    finally:
        set_checkpointing(module, *before)


def _kept(module: Any, tokens: int, noise: bool, allocated: Callable[[], int]) -> int:
    words = min(64, module.get_input_embeddings().weight.shape[0])  # an id beyond them would end a GPU's process
    batch = pack([Datum([i % words for i in range(tokens)], [0, *[1] * (tokens - 1)])], module.device)
    forward = PackedForward(module, states_of(module)[0]())
    with at_rest(module), nullcontext(module.train()) if noise else without_dropout(module), forward.open():
        before = allocated()
        hidden = forward.rows(batch)
        after = allocated()
        del hidden
    return after - before


# The plan's settings for others


def engine_settings(recipe: Recipe, plan: MemoryPlan) -> EngineSettings:
    """The engine of the policy."""
    weights, kv, merge = recipe.model.engine.weights, recipe.model.engine.kv, plan.setting.merge
    return EngineSettings(exact=recipe.model.exact, kv_bytes=plan.kv_bytes, merge=merge, weights=weights, kv=kv)


def configure_learner(config: TrainConfig, plan: MemoryPlan, module: Any) -> TrainConfig:
    """The phase's configuration with the plan's micro-batches; the module computes again what the plan says."""
    set_checkpointing(module, plan.setting.checkpointing)
    return config.model_copy(update={"token_budget": config.token_budget or plan.setting.tokens})


def configure_helpers(recipe: Recipe, plan: MemoryPlan) -> Recipe:
    """The recipe with the plan's keys and values for helper models on the policy's device."""
    first: dict[str, str] = {}
    models = {}
    for name, spec in recipe.models.items():  # roles with the same spec share one model, that of the first
        kv = plan.helper_kv.get(first.setdefault(spec.model_dump_json(), name), 0)
        planned = spec.kind == "local" and not spec.kv_gb and kv
        models[name] = spec.model_copy(update={"kv_gb": kv / 2**30}) if planned else spec
    return recipe.model_copy(update={"models": models})


def make_pool(recipe: Recipe, plan: MemoryPlan) -> ModelPool | None:
    """The pool of helper models that take turns; None where all are always there."""
    return None if plan.layout is None else ModelPool(plan.layout, pick_device(recipe.model.device))


def kv_of_copies(recipe: Recipe, plan: MemoryPlan) -> dict[str, int]:
    """Bytes for keys and values of each frozen copy of the policy, by what follows the @ of its name."""
    copies = {name: spec.model.partition("@")[2] for name, spec in named_models(recipe).items() if "@" in spec.model}
    ahead = {name: name for name in plan.helper_kv if name.startswith("ahead-")}
    return {when: plan.helper_kv.get(name, 0) for name, when in (copies | ahead).items()}
