"""Resuming a run with other settings: which may change, and which would make it a different run. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from upshot.config.layers import differences
from upshot.config.load import load_recipe
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.run.folder import RunFolder

MAY_CHANGE = (
    *("train.steps", "train.epochs", "train.save.every", "train.save.minutes", "train.save.keep", "train.save.best"),
    *("train.max_skipped", "train.token_budget"),
    *("budget", "eval", "models", "serve", "sandbox", "trackers", "call_seconds", "keep_rollouts"),
    *("reward.max_missing", "reward.manager", "model.device", "model.gradient_checkpointing"),
    *("model.memory_gb", "train.optimizer.offload"),
)
"""Keys, and sections with all their keys: how long, how much, who helps, where it runs and what is written."""


def resumed_recipe(folder: RunFolder, overrides: Sequence[str]) -> Recipe:
    """The folder's recipe with `key=value` overrides; one that would make it another run is a `UserError`."""
    recipe = load_recipe(str(folder.path / "recipe.yaml"), overrides).recipe
    for key, (old, new) in differences(folder.recipe, recipe).items():
        if not any(f"{key}.".startswith(f"{free}.") for free in MAY_CHANGE):
            newest = folder.latest()
            start = f"model.path={newest.path}" if newest else "other settings"
            raise UserError(
                f"--resume cannot change {key} ({old!r}, now {new!r}): the finished steps were made with the old "
                f"value, and the rest would not match them. What may change: {', '.join(MAY_CHANGE)}. For anything "
                f"else, start a new run, such as with {start}"
            )
    return recipe
