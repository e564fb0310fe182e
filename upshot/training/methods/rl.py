"""Policy gradient on the policy's own replies; its loop is `training/loops/rl.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from upshot.config.method import TrainingMethod, methods
from upshot.config.recipe import Recipe, TrainConfig
from upshot.tasks.base import Task


@methods.register("rl")
class RLMethod(TrainingMethod):
    """Policy gradient over groups."""

    samples = credits_tokens = compares = on_ray = True
    reads: tuple[str, ...] = (
        "group_size", "async_steps", "dynamic_sampling", "advantage", "loss", "length_norm", "clip", "kl", "entropy",
        "importance",
    )  # fmt: skip

    loop = lessons = "upshot.training.loops.rl"

    def examples(self, config: TrainConfig, task: Task) -> Sequence[Any]:
        """The task's rows."""
        return task.rows("train")

    def prepare(self, config: TrainConfig) -> Callable[..., Any]:
        """See `TrainingMethod`."""
        from upshot.training.loops.rl import RunRules

        return partial(super().prepare(config), rules=RunRules.of(config))

    def needs_reference(self, config: TrainConfig) -> bool:
        """For the divergence from the initial model."""
        return self.reference or bool(config.kl.weight)

    def check_loss(self, recipe: Recipe) -> None:
        """See `TrainingMethod`."""
        from upshot.training.objectives.objectives import surrogate

        surrogate(recipe.train.loss.name, recipe.train.loss.options)
