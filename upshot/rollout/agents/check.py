"""What a recipe may not say where a program plays the episodes, and why; asked before any work."""

from __future__ import annotations

from upshot.config.method import method_of
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.rollout.credit.rules import credit_rule


def check_agent(recipe: Recipe) -> None:
    """Refuse what an episode of several contexts cannot be learned from, or would do nothing."""
    episode, train, who = recipe.episode, recipe.train, "a program plays the episodes (episode.agent)"
    if episode.max_turns > 1 or episode.with_user:
        raise UserError(f"{who} and decides the number of turns; leave out episode.max_turns and with_user")
    if recipe.futures.name not in ("talk", "none"):
        raise UserError(f"{who}, but futures '{recipe.futures.name}' continue a single reply; set futures.name=none")
    if not credit_rule(recipe.credit).one_reward:
        raise UserError(f"{who}, and all its calls share one reward; set credit.by=reply")
    if train.samples and not method_of(train.method).credits_tokens:
        raise UserError(
            f"{who} and its contexts are several sequences; train.method '{train.method}' takes one per reply; use rl"
        )
    if train.samples and train.kl.weight and train.kl.where == "reward":
        raise UserError(f"{who} and its contexts are several sequences; set train.kl.where=loss")
