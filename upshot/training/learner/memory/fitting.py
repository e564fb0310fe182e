"""The memory plan put into practice: what engine, learner and helper models of a run are told."""

from __future__ import annotations

from typing import Any

from upshot.config.recipe import PolicyConfig, Recipe, TrainConfig
from upshot.engine.engine import EngineSettings
from upshot.models.local import pick_device
from upshot.serving.swap.pool import ModelPool
from upshot.training.learner.memory.job import named_models, plan_of, shape_of
from upshot.training.learner.memory.model_shape import ModelShape
from upshot.training.learner.memory.plan import MemoryPlan


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


def planned(recipe: Recipe, words: int = 0, processes: int = 1) -> MemoryPlan | None:
    """The plan of a run that is not loaded; None where the model's config.json is not on this machine.

    Memory that is given by number is taken for a GPU's: a recipe can be planned where there is none.
    """
    shape = shape_of(recipe, words)
    if shape is None:
        return None
    total = device_bytes(recipe.model)
    size = {"float32": 4, "bfloat16": 2, "auto": 2 if total else 4}[recipe.model.dtype]
    return plan_of(recipe, shape, size, total, processes=processes)


def fit(recipe: Recipe, module: Any, config: TrainConfig, processes: int = 1) -> MemoryPlan:
    """The plan of a phase of a run whose model is loaded, for each of so many ranks."""
    text = module.config.to_dict()
    size = module.get_input_embeddings().weight.element_size()
    return plan_of(recipe, ModelShape.of(text), size, device_bytes(recipe.model), config, processes)


def engine_settings(recipe: Recipe, plan: MemoryPlan) -> EngineSettings:
    """The engine of the policy."""
    return EngineSettings(exact=recipe.model.exact, kv_bytes=plan.kv_bytes, merge=plan.setting.merge)


def learning(config: TrainConfig, plan: MemoryPlan, module: Any) -> TrainConfig:
    """The phase's configuration with the plan's micro-batches; the module computes again what the plan says."""
    if plan.setting.checkpointing == "block":
        module.gradient_checkpointing_enable()
    elif module.is_gradient_checkpointing:
        module.gradient_checkpointing_disable()
    return config.model_copy(update={"token_budget": config.token_budget or plan.setting.tokens})


def with_helpers(recipe: Recipe, plan: MemoryPlan) -> Recipe:
    """The recipe with the plan's keys and values for helper models on the policy's device."""
    first: dict[str, str] = {}
    for name, spec in recipe.models.items():  # roles with the same spec share one model, that of the first
        first.setdefault(spec.model_dump_json(), name)
    kv = {name: plan.guest_kv.get(first[spec.model_dump_json()], 0) for name, spec in recipe.models.items()}
    models = {
        name: spec.model_copy(update={"kv_gb": kv[name] / 2**30})
        if spec.kind == "local" and not spec.kv_gb and kv[name]
        else spec
        for name, spec in recipe.models.items()
    }
    return recipe.model_copy(update={"models": models})


def pool_of(recipe: Recipe, plan: MemoryPlan) -> ModelPool | None:
    """The pool of helper models that take turns; None where all are always there."""
    return None if plan.overlay is None else ModelPool(plan.overlay, pick_device(recipe.model.device))


def kv_of_copies(recipe: Recipe, plan: MemoryPlan) -> dict[str, int]:
    """Bytes for keys and values of each frozen copy of the policy, by what follows the @ of its name."""
    copies = {name: spec.model.partition("@")[2] for name, spec in named_models(recipe).items() if "@" in spec.model}
    ahead = {name: name for name in plan.guest_kv if name.startswith("ahead-")}
    return {when: plan.guest_kv.get(name, 0) for name, when in (copies | ahead).items()}
