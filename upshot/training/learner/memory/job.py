"""From a recipe to its memory plan, or the reasons why it does not fit and what would. No weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import LoraConfig, Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.rollout.futures.classmates.map_file import classmate_names
from upshot.training.learner.memory import activations
from upshot.training.learner.memory.choice import choose, smallest, unlimited
from upshot.training.learner.memory.model_shape import SEVEN, ModelShape, read_config
from upshot.training.learner.memory.plan import HelperModel, MemoryJob, MemoryPlan, RequestedSetting, usable
from upshot.training.learner.memory.table import arithmetic

FOUR_BIT = 0.52
"""Bytes of a weight in 4 bits, with its share of the scales."""
PROMPT = 1024
"""Tokens that a prompt is taken to have where nothing says how long one may be."""


def shape_of(recipe: Recipe, words: int = 0) -> ModelShape | None:
    """The policy's shape; None where its config.json is not on this machine. `words`: of a new tiny model."""
    from upshot.models.local import local_path

    tiny = recipe.model.tiny
    if not recipe.model.path:
        head = tiny.hidden // tiny.heads
        return ModelShape(
            tiny.hidden, tiny.layers, tiny.heads, tiny.heads, head, tiny.mlp, words, tiny.context, tied=True
        )
    config = read_config(local_path(recipe.model.path))
    return None if config is None else ModelShape.of(config)


def targets_of(lora: LoraConfig) -> list[str]:
    """The modules that have adapters."""
    return list(lora.targets or SEVEN)


def job_of(
    recipe: Recipe, shape: ModelShape, size: int, config: TrainConfig | None = None, processes: int = 1
) -> MemoryJob:
    """What a recipe must have in memory; `size`: bytes of one of the model's numbers, `config`: the phase's."""
    config = config or recipe.train
    model = recipe.model
    lora = model.lora
    targets = targets_of(lora) if lora else []
    weights = shape.parameters * size
    if model.quantize == "4bit":
        weights = int(shape.projections * FOUR_BIT) + shape.outside * size
    samples = config.samples
    inside = [name for name in targets if name in SEVEN]
    called = lora is not None and (
        model.quantize != "none" or lora.kind == "dora" or (lora.dropout > 0 and config.method == "sft")
    )
    guests = tuple(_guests(recipe, shape, size)) if samples else ()
    samples = samples and model.engine.name == "upshot"  # vLLM has memory of its own
    return MemoryJob(
        shape=shape,
        size=size,
        weights=weights,
        trained=shape.adapters(lora.r, targets, lora.kind == "dora") if lora else shape.parameters,
        trained_size=4 if lora else size,
        adapters=lora is not None,
        copy=shape.merged(targets) * size if lora and not model.exact else 0,
        ranks=lora.r * len(inside) if lora else 0,
        block=activations.block_kind(shape, called),
        small_state=config.optimizer.name == "adamw-8bit",
        offload=config.optimizer.offload,
        reference=bool(config.kl.weight) or config.method in ("dpo", "online-dpo"),
        samples=samples,
        longest=model.max_context,
        wanted=_wanted(recipe, shape),
        lends=model.quantize == "none" and not model.exact and not any(guest.copy for guest in guests),
        overlaps=config.async_steps > 0,
        guests=guests,
        processes=processes,
    )


def _wanted(recipe: Recipe, shape: ModelShape) -> int:
    """Tokens whose keys and values are of use at once: all replies and futures of a step at their longest."""
    config, episode, futures = recipe.train, recipe.episode, recipe.futures
    replies = min(config.prompts_per_step * config.group_size * max(futures.samples, 1), activations.ROWS)
    turns = episode.max_turns + 2 * futures.rounds
    length = recipe.model.max_context or PROMPT + turns * episode.max_tokens
    return replies * min(length, shape.context or length)


def _guests(recipe: Recipe, policy: ModelShape, size: int) -> Iterator[HelperModel]:
    """Helper models on the policy's device, and frozen copies of it."""
    lora = recipe.model.lora
    ahead = {f"ahead-{n}": ModelSpec(model="policy@1") for n in range(recipe.train.async_steps)}
    seen: list[ModelSpec] = []
    for name, spec in (named_models(recipe) | ahead).items():
        if spec.kind == "local":  # roles with the same spec share one model (models/connect.py)
            if spec in seen:
                continue
            seen.append(spec)
        if spec.kind == "policy" and "@" in spec.model:
            own = policy.parameters * size
            if lora is not None:  # what is not trained is shared; a new adapter adds nothing to what is shared
                targets = targets_of(lora)
                fresh = spec.model == "policy@start"
                own = policy.adapters(lora.r, targets) * 4 + (0 if fresh else policy.merged(targets) * size)
            yield _guest(name, own, policy, size, copy=True)
        elif spec.kind == "local" and spec.device in ("auto", recipe.model.device):
            from upshot.models.local import local_path

            config = read_config(local_path(spec.model))
            if config is not None:
                shape, own_size = ModelShape.of(config), 4 if spec.dtype == "float32" else size
                found = _guest(name, shape.parameters * own_size, shape, own_size)
                pages = int(spec.kv_gb * 2**30)
                yield replace(found, kv=0, pages=pages) if pages else found


def _guest(name: str, weights: int, shape: ModelShape, size: int, copy: bool = False) -> HelperModel:
    step = activations.sampling(shape, size) + activations.graphs(shape, size)
    return HelperModel(name, weights, step, shape.kv_numbers * size, copy)


def named_models(recipe: Recipe) -> dict[str, ModelSpec]:
    """Helper models by name: those of `models`, and copies of the policy that classmates are."""
    return dict(recipe.models) | {
        name: ModelSpec(model=name) for name in classmate_names(recipe.futures) if name.startswith("policy@")
    }


def wish_of(recipe: Recipe, config: TrainConfig | None = None) -> RequestedSetting:
    """What the recipe has decided."""
    again = recipe.model.gradient_checkpointing
    return RequestedSetting((config or recipe.train).token_budget, None if again == "auto" else again)


def plan_of(
    recipe: Recipe, shape: ModelShape, size: int, total: int, config: TrainConfig | None = None, processes: int = 1
) -> MemoryPlan:
    """The plan for a device of `total` bytes (0: not limited); `UserError` with arithmetic and way out if none fits."""
    job, wish = job_of(recipe, shape, size, config, processes), wish_of(recipe, config)
    if not total:
        return unlimited(job, wish)
    limit = usable(total)
    found = choose(job, limit, wish)
    if found is None:
        closest = smallest(job, limit, wish)
        raise UserError(
            f"the run does not fit into {limit / 2**30:.1f} GiB of the device: {arithmetic(closest)}; "
            f"{suggestion(recipe, shape, size, limit, processes)}"
        )
    return found


def _with(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    changed = {name: getattr(recipe, name).model_copy(update=fields) for name, fields in sections.items()}
    return recipe.model_copy(update=changed)


def changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """What a user could set to need less, the mildest first."""
    model, config = recipe.model, recipe.train
    if config.token_budget:
        yield "train.token_budget=0", _with(recipe, train={"token_budget": 0})
    if model.gradient_checkpointing == "none":
        yield "model.gradient_checkpointing=auto", _with(recipe, model={"gradient_checkpointing": "auto"})
    if model.lora is None:
        yield (
            "train.optimizer=adamw-8bit",
            _with(recipe, train={"optimizer": config.optimizer.model_copy(update={"name": "adamw-8bit"})}),
        )
        yield (
            "train.optimizer.offload=true",
            _with(recipe, train={"optimizer": config.optimizer.model_copy(update={"offload": True})}),
        )
        yield "model.lora={r: 32}", _with(recipe, model={"lora": LoraConfig(r=32)})
    lora = model.lora or LoraConfig(r=32)
    if model.quantize == "none":
        yield "model.lora={r: 32} model.quantize=4bit", _with(recipe, model={"lora": lora, "quantize": "4bit"})
    for length in (16384, 8192, 4096, 2048):
        if not model.max_context or length < model.max_context:
            yield f"model.max_context={length}", _with(recipe, model={"max_context": length})
    if recipe.models:
        yield "helper models elsewhere (models.NAME.device, or a url)", recipe.model_copy(update={"models": {}})


def suggestion(recipe: Recipe, shape: ModelShape, size: int, limit: int, processes: int = 1) -> str:
    """What would make it fit."""

    def fits(other: Recipe) -> bool:
        return choose(job_of(other, shape, size, processes=processes), limit, wish_of(other)) is not None

    fitting = [text for text, other in changes(recipe) if fits(other)]
    if fitting:
        return "it would with " + ", or ".join(fitting[:3])
    return "no setting makes it fit: take a smaller model or a larger device"
