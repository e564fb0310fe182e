"""Plan many models on one device.

Compute, before anything is loaded, the bytes of every model's weights, keys and values and steps, and of the learner at
its peak. Models that do not fit together take turns; what cannot fit is refused.
"""

from __future__ import annotations

import argparse

from upshot.cli.options import add_options, add_parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb below it."""
    add_parts(parser, plan=add_plan)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Print the memory plan of a recipe."""
    add_options(parser, "recipe", "overrides", overrides={"help": "such as model.memory_gb=80 (for another device)"})


def run(args: argparse.Namespace) -> int:
    """Print the plan, or refuse it with the arithmetic and a way out."""
    from upshot.config.load import load_recipe
    from upshot.core.errors import UserError
    from upshot.tasks.base import tasks
    from upshot.training.learner.memory.fit import plan_recipe, require_sizes
    from upshot.training.learner.memory.table import table

    recipe = load_recipe(args.recipe, args.overrides).recipe
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    require_sizes(recipe)
    plan = plan_recipe(recipe, len(task.vocabulary() or ()))
    if plan is None:
        raise UserError(f"'{recipe.model.path}' cannot be planned: its config.json is not on this machine")
    print(table(plan))
    return 0
