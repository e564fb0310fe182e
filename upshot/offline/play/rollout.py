"""`upshot rollout RECIPE --n 3`: a few prompts played and scored as training would, printed as trees; nothing learns.

With --step it stops before every call of a model, a user, an environment or a metric, and shows what came back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from upshot.config.load import load_recipe
from upshot.core.errors import UserError
from upshot.core.score import Score, describe_missing
from upshot.core.time_limit import call_seconds
from upshot.models.base import Request
from upshot.offline.play.opened import OpenedRecipe, open_recipe, recipe_of_run
from upshot.offline.play.trees import clean, cut, group_tree, tell_score
from upshot.rollout.check_names import check_names
from upshot.rollout.play import play_step
from upshot.rollout.reply import Rollout
from upshot.tasks.participants.base import Observation

LONG_S = 86_400.0
"""The limit of a call while somebody steps through it."""


def run(args: argparse.Namespace) -> int:
    """Play and print; 1 when no reply has a reward."""
    recipe = load_recipe(args.recipe, args.overrides).recipe
    check_names(recipe)
    if not recipe.train.samples:
        raise UserError(
            f"train.method '{recipe.train.method}' plays no rollouts; give a recipe of rl, ppo or online-dpo"
        )
    spec = args.model or (args.recipe if recipe_of_run(args.recipe) else None)

    async def play() -> tuple[OpenedRecipe, list[list[Rollout]]]:
        async with open_recipe(recipe, spec) as opened:
            if args.step:
                step_through(opened)
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
    """The trees, and what they come to."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    for group in groups:
        console.print(group_tree(group, f"prompt {group[0].conversation.row.id}"))
        console.print()
    totals = [reply.reward.total for group in groups for reply in group]
    values = [total.value for total in totals if total.value is not None]
    mean = f"reward {sum(values) / len(values):.4g} on average" if values else "no reply has a reward"
    alike = sum(len({reply.reward.total.value for reply in group}) == 1 for group in groups if len(group) > 1)
    same = f"; in {alike} of {len(groups)} prompts all replies earn the same, which teaches nothing" if alike else ""
    console.print(f"{len(totals)} replies, {mean}{same}")
    for line in describe_missing(totals):
        console.print(f"missing {line}", style="yellow")
    if opened.recipe.warm_start is not None and not opened.recipe.model.path:
        console.print("a new model of random weights: its warm start has not been", style="dim")


# Stepping.


def step_through(opened: OpenedRecipe) -> None:
    """Stop before every call to a model, user, environment or metric, and show what came back."""
    if not sys.stdin.isatty():
        raise UserError("--step waits for you at each call: it needs a terminal")
    call_seconds.set(LONG_S)
    stepper = Stepper()
    services, context = opened.services, opened.context
    stepper.watch(context.policy.model, "generate", "policy")
    for name, model in services.models.items():
        stepper.watch(model, "generate", f"model {name}")
    if services.user is not None:
        stepper.watch(services.user, "observe", "user")
    if context.environment is not None and context.environment is not services.user:
        stepper.watch(context.environment, "observe", "environment")
    for name, metric in services.metrics.items():
        stepper.watch(metric, "score", f"metric {name}")


class Stepper:
    """Holds calls up, one at a time, until the person at the terminal lets them go."""

    def __init__(self, ask: Callable[[str], str] = input) -> None:
        self.ask = ask
        self.free = False
        """Whether nobody is held up any more."""
        self._one = asyncio.Lock()

    def watch(self, owner: Any, method: str, who: str) -> None:
        """Put the stop before a method of one object."""
        call: Callable[..., Awaitable[Any]] = getattr(owner, method)

        async def stopped(argument: Any, *rest: Any, **named: Any) -> Any:
            async with self._one:
                self._wait(who, argument)
            result = await call(argument, *rest, **named)
            if not self.free:
                print(f"  {who} → {tell(result)}")
            return result

        setattr(owner, method, stopped)

    def _wait(self, who: str, argument: Any) -> None:
        if self.free:
            return
        answer = self.ask(f"{who} ← {tell(argument)}\n  [Enter: go on, c: to the end, q: stop] ").strip().lower()
        if answer == "q":
            raise UserError("stopped at your word; nothing was written")
        self.free = answer == "c"


def tell(thing: Any) -> str:
    """What goes into a call or comes out of it, in a line or two."""
    if isinstance(thing, Request):
        last = thing.prompt[-1] if thing.prompt else ""
        text = f"{len(thing.prompt)} token ids" if thing.by_ids else getattr(last, "content", "")
    elif isinstance(thing, Score):
        text = tell_score(thing)
    elif isinstance(thing, Observation):
        text = " ".join(message.content for message in thing.messages) + (
            f" (done: {thing.reason})" if thing.done else ""
        )
    elif isinstance(thing, list):
        text = getattr(thing[0], "text", str(thing)) if thing else "nothing"
    else:
        text = thing.messages[-1].content if getattr(thing, "messages", ()) else "the opening"
    return cut(clean(str(text)).replace("\n", " "), 300)
