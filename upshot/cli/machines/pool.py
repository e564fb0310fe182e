"""`upshot pool plan RECIPE`: which models share the policy's device, and who takes turns with whom."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "pool",
        help="plan many models on one device",
        description="Bytes of every model's weights, keys and values and steps and of the learner at its peak, before "
        "anything is loaded; models that do not fit together take turns. What cannot fit is refused.",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    planning = verbs.add_parser("plan", help="print the memory plan of a recipe")
    planning.add_argument("recipe", help="recipe name or file")
    planning.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as model.memory_gb=80 (for another device)"
    )
    planning.set_defaults(run=run)


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
