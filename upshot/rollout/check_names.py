"""Names and options of a recipe are checked before any work: nothing is built, connected or loaded for it."""

from __future__ import annotations

from typing import Any

from upshot.config.recipe import Named, Recipe
from upshot.config.registry import Registry
from upshot.core.errors import UserError, did_you_mean
from upshot.rewards.build import check_metric
from upshot.rewards.monitor import METRIC
from upshot.rewards.workers.base import managers
from upshot.rollout.dependencies import FUTURE_NAMES, NAMES
from upshot.rollout.futures.base import kinds
from upshot.rollout.futures.classmates.map_file import read_map
from upshot.serving.servers.state import check_served
from upshot.tasks.base import tasks
from upshot.tasks.participants.base import users


def check_names(recipe: Recipe) -> None:
    """Refuse unknown tasks, metrics, users, futures, estimators and their options, before any work."""
    from upshot.rewards.advantages.base import estimator

    given = dict.fromkeys(NAMES)
    tasks.check(recipe.task.name, recipe.task.options, "task")
    for metric in recipe.reward.metrics:
        check_metric(metric.name, metric.options, "reward.metrics", **given)
    _check_named(managers, recipe.reward.manager, "reward.manager")
    if recipe.futures.user is not None:
        _check_named(users, recipe.futures.user, "futures.user")
    options = recipe.futures.options
    if recipe.futures.map_file is not None:
        options["classmates"] = read_map(recipe.futures.map_file)[1]
    kinds.check(recipe.futures.name, options, "futures", **dict.fromkeys(FUTURE_NAMES))
    estimator(recipe.train.advantage.name, recipe.train.advantage.options)
    _check_credit(recipe)
    _check_monitor(recipe)
    check_served(recipe.serve, recipe.models)


def _check_named(registry: Registry[Any], named: Named, where: str) -> None:
    registry.check(named.name, named.options, where, **dict.fromkeys(NAMES))


def _check_monitor(recipe: Recipe) -> None:
    """A monitor is one of the helper models, and predicts a score that is there."""
    name = recipe.eval.monitor
    if name is None:
        return
    models = {*recipe.models, *(read_map(recipe.futures.map_file)[0] if recipe.futures.map_file else ())}
    if name not in models:
        raise UserError(f"eval.monitor is '{name}', which is no model under `models`; {did_you_mean(name, models)}")
    if METRIC not in (metric.name for metric in recipe.reward.metrics):
        raise UserError(f"eval.monitor predicts the metric '{METRIC}'; add it to reward.metrics (weight: 0 only logs)")


def _check_credit(recipe: Recipe) -> None:
    """Credit that nothing could come of; methods that learn from one number a reply refuse credit for spans of it."""
    method, futures = recipe.train.method, recipe.futures
    levels = [futures.samples] if isinstance(futures.samples, int) else futures.samples
    if len(levels) > max(futures.rounds, 1):
        raise UserError(
            f"futures.samples {levels} forks at {len(levels)} rounds, and futures.rounds is {futures.rounds}; "
            f"take as many rounds, or fewer forks"
        )
    if recipe.credit.by == "tree" and futures.rounds and futures.leaves == 1 and method != "ppo":
        raise UserError(
            "credit.by 'tree' compares the futures of a reply with each other, and futures.samples is 1; "
            "take 2 or more, or credit.by=reply"
        )
    if method not in ("ppo", "online-dpo"):
        return
    if recipe.futures.name not in ("talk", "none"):
        raise UserError(f"train.method '{method}' takes one reward a reply; futures '{recipe.futures.name}' need rl")
    if recipe.credit.by == "turns" or recipe.credit.tokens != "all":
        raise UserError(f"train.method '{method}' takes one reward a reply; `credit` by turns or tokens needs rl")
