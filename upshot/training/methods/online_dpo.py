"""Pairs of the policy's own replies; see `training/loops/online_dpo.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from upshot.config.method import TrainingMethod, methods
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.training.methods.rl import RLMethod


@methods.register("online-dpo")
class OnlineDPOMethod(RLMethod):
    """Pairs of the policy's own replies, ranked by reward."""

    credits_tokens = on_ray = False
    reference = True
    reads = ("group_size", "async_steps", "dynamic_sampling", "dpo")
    lessons = "upshot.training.loops.online_dpo"

    def prepare(self, config: TrainConfig) -> Callable[..., Any]:
        """It has neither an estimator nor a surrogate to look up."""
        return TrainingMethod.prepare(self, config)

    def check(self, recipe: Recipe) -> None:
        """Refuse groups without a pair."""
        if recipe.train.group_size < 2:
            raise UserError("online-dpo ranks the replies to a prompt; set train.group_size to 2 or more")

    def check_loss(self, recipe: Recipe) -> None:
        """Nothing to refuse: its loss is its own."""
