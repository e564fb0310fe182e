"""Plan many models on one device.

Compute, before anything is loaded, the bytes of every model's weights, keys and values and steps, and of the learner at
its peak. Models that do not fit together take turns; what cannot fit is refused.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from upshot.cli.options import add_options, add_parts

if TYPE_CHECKING:
    from upshot.config.recipe import Recipe

PROVIDER = re.compile(r"[a-z0-9_]+/")
"""Prefixes of model names at providers; hub names begin with the model's owner instead."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb below it."""
    add_parts(parser, plan=add_plan)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Print the memory plan of a recipe."""
    add_options(parser, "recipe", "overrides", overrides={"help": "such as model.memory_gb=80 (for another device)"})


def run(args: argparse.Namespace) -> int:
    """Print the plan, or refuse it and show the arithmetic and a way out."""
    from upshot.config.load import load_recipe
    from upshot.core.errors import UserError
    from upshot.run.forecast import memory_table
    from upshot.tasks.base import tasks
    from upshot.training.learner.memory.fit import plan_recipe

    recipe = load_recipe(args.recipe, args.overrides).recipe
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    require_sizes(recipe)
    plan = plan_recipe(recipe, len(task.vocabulary() or ()))
    if plan is None:
        raise UserError(f"'{recipe.model.path}' cannot be planned: its config.json is not on this machine")
    print(memory_table(plan))
    return 0


def require_sizes(recipe: Recipe) -> None:
    """Fetch the config.json of every helper model on the policy's device; `UserError` if one is not available."""
    from upshot.core.errors import UserError
    from upshot.models.local import find_config, local_path

    for name, spec in recipe.needed_models.items():
        if spec.kind == "provider" and not PROVIDER.match(spec.model):
            raise UserError(
                f"models.{name}={spec.model} would be looked up at a provider called "
                f"'{spec.model.partition('/')[0]}'; for a hub model here, set models.{name}=local:{spec.model}"
            )
        if not spec.runs_on(recipe.model.device) or find_config(spec.model, offline=True) is not None:
            continue
        from huggingface_hub import hf_hub_download

        path = local_path(spec.model)
        try:
            hf_hub_download(path, "config.json")
        except Exception as error:  # no such name, no network, no permission: in all cases the size is unknown
            raise UserError(
                f"models.{name}: the size of '{spec.model}' is not known: its config.json is not on this machine and "
                f"cannot be fetched ({type(error).__name__}); name a folder, or: hf download {path} config.json"
            ) from error
