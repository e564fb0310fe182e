"""From a recipe to its memory plan, or the reason why it does not fit and what would; and what the plan tells others.

No weights are loaded: a plan is made from a config.json, or of a model that somebody else has loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import LoraConfig, PolicyConfig, Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.engine.engine import EngineSettings
from upshot.models.local import local_path, pick_device
from upshot.rollout.futures.classmates.map_file import classmate_names
from upshot.serving.swap.pool import ModelPool
from upshot.training.learner.memory.choice import choose, find_nearest, plan_unlimited
from upshot.training.learner.memory.plan import HelperModel, MemoryJob, MemoryPlan, step_bytes, usable
from upshot.training.learner.memory.shape import SEVEN, ModelShape, read_config
from upshot.training.learner.memory.table import arithmetic
from upshot.training.snapshots import states_at_once

PROVIDER = re.compile(r"[a-z0-9_]+/")
"""How names of models at providers begin; those of the hub begin with whoever made them."""

# The device


def device_bytes(config: PolicyConfig) -> int:
    """Bytes of the policy's device that can be had; 0 on the CPU, where nothing is planned."""
    import torch

    if config.memory_gb:
        return int(config.memory_gb * 2**30)
    device = torch.device(pick_device(config.device))
    if device.type != "cuda":
        return 0
    return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)


def device_total(config: PolicyConfig) -> int:
    """Bytes that the policy's GPU has in all."""
    import torch

    return int(torch.cuda.get_device_properties(torch.device(pick_device(config.device))).total_memory)


# The plan of a recipe


def plan_recipe(recipe: Recipe, words: int = 0, processes: int = 1) -> MemoryPlan | None:
    """The plan of a run that is not loaded; None where the model's config.json is not on this machine.

    Memory that is given by number is taken for a GPU's: a recipe can be planned where there is none.
    """
    shape = shape_of(recipe, words)
    if shape is None:
        return None
    total = device_bytes(recipe.model)
    size = {"float32": 4, "bfloat16": 2, "auto": 2 if total else 4}[recipe.model.dtype]
    return plan_of(recipe, shape, size, total, processes=processes)


def plan_loaded(recipe: Recipe, module: Any, config: TrainConfig, processes: int = 1) -> MemoryPlan:
    """The plan of a phase of a run whose model is loaded, for each of so many ranks."""
    size = module.get_input_embeddings().weight.element_size()
    shape = ModelShape.of(module.config.to_dict())
    return plan_of(recipe, shape, size, device_bytes(recipe.model), config, processes)


def shape_of(recipe: Recipe, words: int = 0) -> ModelShape | None:
    """The policy's shape; None where its config.json is not on this machine. `words`: of a new tiny model."""
    tiny = recipe.model.tiny
    if not recipe.model.path:
        head = tiny.hidden // tiny.heads
        return ModelShape(
            tiny.hidden, tiny.layers, tiny.heads, tiny.heads, head, tiny.mlp, words, tiny.context, tied=True
        )
    config = read_config(local_path(recipe.model.path))
    return None if config is None else ModelShape.of(config)


def plan_of(
    recipe: Recipe, shape: ModelShape, size: int, total: int, config: TrainConfig | None = None, processes: int = 1
) -> MemoryPlan:
    """The plan for a device of `total` bytes (0: not limited); `UserError` with arithmetic and way out if none fits."""
    job = job_of(recipe, shape, size, config, processes)
    if not total:
        return plan_unlimited(job)
    limit = usable(total)
    plan = choose(job, limit)
    if plan is None:
        mild = [text for text, other in changes(recipe) if choose(job_of(other, shape, size, None, processes), limit)]
        way_out = f"it would with {', or '.join(mild[:3])}" if mild else "no setting makes it fit: take a smaller model"
        raise UserError(
            f"the run does not fit into {limit / 2**30:.1f} GiB of the device: {arithmetic(find_nearest(job, limit))}; "
            f"{way_out}{'' if mild else ' or a larger device'}"
        )
    return plan


def job_of(
    recipe: Recipe, shape: ModelShape, size: int, config: TrainConfig | None = None, processes: int = 1
) -> MemoryJob:
    """The job of a recipe; `size`: bytes of one of the model's numbers, `config`: the phase's."""
    config = config or recipe.train
    helpers = tuple(_helpers(recipe, shape, size)) if config.samples else ()
    return MemoryJob(recipe, config, shape, size, helpers, processes)


def _helpers(recipe: Recipe, policy: ModelShape, size: int) -> Iterator[HelperModel]:
    """Helper models on the policy's device, and frozen copies of it."""
    ahead = {f"ahead-{n}": ModelSpec(model="policy@1") for n in range(recipe.train.async_steps)}
    seen: list[ModelSpec] = []
    for name, spec in (named_models(recipe) | ahead).items():
        if spec.kind == "policy" and "@" in spec.model:
            own, lora = policy.parameters * size, recipe.model.lora
            narrow = recipe.model.engine.weights == "fp8"
            if lora is not None:  # what is not trained is shared; a new adapter adds nothing to what is shared
                targets = [name for name in lora.targets or SEVEN if not (narrow and name in SEVEN)]
                fresh = spec.model == "policy@start"
                own = policy.adapters(lora.r, lora.targets or SEVEN) * 4
                own += 0 if fresh else policy.count_merged(targets) * size
            own += policy.projections if narrow else 0
            every = spec.model.partition("@")[2]
            states = states_at_once(int(every), len(ahead)) if every.isdigit() and name not in ahead else 1
            kv = policy.kv_numbers * (1 if recipe.model.engine.kv == "fp8" else size)
            one = HelperModel(name, own, sum(step_bytes(policy, size)), kv, copy=True)
            yield from (replace(one, name=name if not number else f"{name} ({number})") for number in range(states))
        elif spec.kind == "local" and spec not in seen:  # roles with the same spec share one model (models/connect.py)
            seen.append(spec)
            config = read_config(local_path(spec.model)) if spec.device in ("auto", recipe.model.device) else None
            if config is not None:
                shape, each = ModelShape.of(config), 4 if spec.dtype == "float32" else size
                pages = int(spec.kv_gb * 2**30)
                kv = 0 if pages else shape.kv_numbers * (1 if spec.kv == "fp8" else each)
                saved = shape.projections * (each - 1) if spec.weights == "fp8" else 0
                yield HelperModel(name, shape.parameters * each - saved, sum(step_bytes(shape, each)), kv, pages=pages)


def require_sizes(recipe: Recipe) -> None:
    """Have the config.json of every helper model on the policy's device here; `UserError` where one cannot be had."""
    for name, spec in named_models(recipe).items():
        if spec.kind == "provider" and not PROVIDER.match(spec.model):
            raise UserError(
                f"models.{name}={spec.model} would be asked at a provider called '{spec.model.partition('/')[0]}'; for "
                f"the hub's model on this device: models.{name}=local:{spec.model}"
            )
        own = spec.kind == "local" and spec.device in ("auto", recipe.model.device)
        if not own or read_config(path := local_path(spec.model)) is not None:
            continue
        from huggingface_hub import hf_hub_download

        try:
            hf_hub_download(path, "config.json")
        except Exception as error:  # no such name, no network, no leave: in all cases its size is not known
            raise UserError(
                f"models.{name}: the size of '{spec.model}' is not known: its config.json is not on this machine and "
                f"cannot be fetched ({type(error).__name__}); name a folder, or: hf download {path} config.json"
            ) from error


def named_models(recipe: Recipe) -> dict[str, ModelSpec]:
    """Helper models by name: those of `models` that are asked, and copies of the policy that classmates are."""
    return recipe.needed_models | {
        name: ModelSpec(model=name) for name in classmate_names(recipe.futures) if name.startswith("policy@")
    }


def changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """What a user could set to need less, the mildest first."""

    def change(section: str, **fields: Any) -> Recipe:
        return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=fields)})

    model, config = recipe.model, recipe.train
    lora = model.lora or LoraConfig(r=32)
    if config.token_budget:
        yield "train.token_budget=0", change("train", token_budget=0)
    if model.gradient_checkpointing == "none":
        yield "model.gradient_checkpointing=auto", change("model", gradient_checkpointing="auto")
    if model.lora is None:
        small, offloaded = (
            config.optimizer.model_copy(update=fields) for fields in ({"name": "adamw-8bit"}, {"offload": True})
        )
        yield "train.optimizer=adamw-8bit", change("train", optimizer=small)
        yield "train.optimizer.offload=true", change("train", optimizer=offloaded)
        yield "model.lora={r: 32}", change("model", lora=lora)
    if model.quantize == "none":
        yield "model.lora={r: 32} model.quantize=4bit", change("model", lora=lora, quantize="4bit")
    for length in (16384, 8192, 4096, 2048):
        if not model.max_context or length < model.max_context:
            yield f"model.max_context={length}", change("model", max_context=length)
    if recipe.models:
        yield "helper models elsewhere (models.NAME.device, or a url)", recipe.model_copy(update={"models": {}})


# What the plan tells others


def engine_settings(recipe: Recipe, plan: MemoryPlan) -> EngineSettings:
    """The engine of the policy."""
    model = recipe.model
    return EngineSettings(
        exact=model.exact,
        kv_bytes=plan.kv_bytes,
        merge=plan.setting.merge,
        weights=model.engine.weights,
        kv=model.engine.kv,
    )


def configure_learner(config: TrainConfig, plan: MemoryPlan, module: Any) -> TrainConfig:
    """The phase's configuration with the plan's micro-batches; the module computes again what the plan says."""
    if plan.setting.checkpointing == "block":
        module.gradient_checkpointing_enable()
    elif module.is_gradient_checkpointing:
        module.gradient_checkpointing_disable()
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
