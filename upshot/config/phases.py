"""The phases of a run: an optional warm start, then the method."""

from __future__ import annotations

from upshot.config.recipe import Recipe, ScheduleConfig, TrainConfig

WARM_START = "warm-start"


def phases_of(recipe: Recipe) -> list[str]:
    """The names of a recipe's phases, in order."""
    warm = recipe.warm_start
    warmed = warm is not None and not (warm.new_model_only and recipe.model.path)
    return [*([WARM_START] if warmed else []), recipe.train.method]


def phase_config(recipe: Recipe, phase: str) -> TrainConfig:
    """How a phase learns; the warm start has its own training configuration."""
    warm = recipe.warm_start
    if phase != WARM_START or warm is None:
        return recipe.train
    schedule = ScheduleConfig(name="cosine", warmup_steps=warm.warmup_steps, min_lr=0.0)
    size = {"steps": warm.steps, "epochs": None, "prompts_per_step": warm.batch, "minibatches": 1}
    how = {"method": "sft", "lr": warm.lr, "schedule": schedule, "length_norm": "token"}
    return recipe.train.model_copy(update={**size, **how})


def phase_order(phase: str, step: int) -> tuple[bool, int]:
    """A sort key for (phase, step): the warm start comes before every method."""
    return phase != WARM_START, step
