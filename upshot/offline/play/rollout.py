"""`upshot rollout RECIPE --n 3`: a few prompts played and scored as in training, printed as trees; nothing learns."""

from __future__ import annotations

import argparse
import asyncio
import json

from upshot.config.load import load_recipe
from upshot.core.errors import UserError
from upshot.core.score import describe_missing
from upshot.offline.play.opened import OpenedRecipe, open_recipe, recipe_of_run
from upshot.offline.play.trees import group_tree
from upshot.rollout.check_names import check_names
from upshot.rollout.play import play_step
from upshot.rollout.reply import Rollout


def run(args: argparse.Namespace) -> int:
    """Play and print; 1 if no reply has a reward."""
    recipe = load_recipe(args.recipe, args.overrides).recipe
    check_names(recipe)
    if not recipe.train.samples:
        raise UserError(f"train.method '{recipe.train.method}' plays no rollouts; choose rl, ppo or online-dpo")
    spec = args.model or (args.recipe if recipe_of_run(args.recipe) else None)

    async def play() -> tuple[OpenedRecipe, list[list[Rollout]]]:
        async with open_recipe(recipe, spec) as opened:
            rows = list(opened.task.rows(args.split))[: args.n]
            if not rows:
                raise UserError(f"task '{opened.task.name}' has no rows in its split '{args.split}'")
            return opened, await play_step(opened.context, rows, args.replies, args.seed)

    opened, groups = asyncio.run(play())
    if args.json:
        for group in groups:
            print("\n".join(json.dumps(reply.to_dict(0), ensure_ascii=False, default=str) for reply in group))
    else:
        show(groups, opened)
    scored = [reply.reward.total for group in groups for reply in group]
    return 0 if any(score.value is not None for score in scored) else 1


def show(groups: list[list[Rollout]], opened: OpenedRecipe) -> None:
    """The trees, and a summary of their rewards."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    for group in groups:
        console.print(group_tree(group, f"prompt {group[0].conversation.row.id}"))
        console.print()
    totals = [reply.reward.total for group in groups for reply in group]
    values = [total.value for total in totals if total.value is not None]
    mean = f"reward {sum(values) / len(values):.4g} on average" if values else "no reply has a reward"
    alike = sum(len({reply.reward.total.value for reply in group}) == 1 for group in groups if len(group) > 1)
    same = f"; for {alike} of {len(groups)} prompts all replies earn the same, which teaches nothing" if alike else ""
    console.print(f"{len(totals)} replies, {mean}{same}")
    for line in describe_missing(totals):
        console.print(f"missing {line}", style="yellow")
    if opened.recipe.warm_start is not None and not opened.recipe.model.path:
        console.print("a new model with random weights, before its warm start", style="dim")
