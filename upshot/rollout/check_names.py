"""Names, options and what they mean together are checked before any work: nothing is connected or loaded for it."""

from __future__ import annotations

from pathlib import Path

from upshot.config.method import method_of
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError, did_you_mean
from upshot.core.score import Score
from upshot.rewards.advantages.grouped import Estimator, estimator, estimators
from upshot.rewards.build import check_metric
from upshot.rewards.credit import MAIN, Credit, Span
from upshot.rewards.monitor import METRIC
from upshot.rewards.workers.base import managers
from upshot.rollout.agents.check import check_agent
from upshot.rollout.agents.runner import find_command, find_function
from upshot.rollout.credit.rules import check_rule, credit_rule
from upshot.rollout.dependencies import FUTURE_NAMES, NAMES
from upshot.rollout.futures.classmates.map_file import read_map
from upshot.rollout.futures.talk import kinds
from upshot.serving.servers.state import check_served
from upshot.tasks.base import tasks
from upshot.tasks.participants.base import users


def check_names(recipe: Recipe) -> None:
    """Refuse unknown tasks, metrics, users, futures, estimators and their options, before any work."""
    for folder in recipe.code:
        if not Path(folder).is_dir():
            raise UserError(f"code: there is no folder '{folder}'; name one that exists, or leave it out")
    known = dict.fromkeys(NAMES)
    tasks.check(recipe.task.name, recipe.task.options, "task")
    for metric in recipe.reward.metrics:
        check_metric(metric.name, metric.options, "reward.metrics", **known)
    managers.check(recipe.reward.manager.name, recipe.reward.manager.options, "reward.manager", **known)
    if recipe.futures.user is not None:
        users.check(recipe.futures.user.name, recipe.futures.user.options, "futures.user", **known)
    options = recipe.futures.options
    if recipe.futures.map_file is not None:
        options["classmates"] = read_map(recipe.futures.map_file)[1]
    kinds.check(recipe.futures.name, options, "futures", **dict.fromkeys(FUTURE_NAMES))
    check_rule(recipe.credit)
    method_of(recipe.train.method).check(recipe)
    _check_groups(recipe)
    if recipe.episode.agent is not None:
        check_agent(recipe)
        _ = find_function(recipe.episode.agent.program) or find_command(recipe.episode.agent.program)
    if recipe.train.samples:
        _check_reward(recipe)
        _check_thoughts(recipe)
    _check_credit(recipe)
    _check_evaluation(recipe)
    check_served(recipe.serve, recipe.models)


def _check_groups(recipe: Recipe) -> None:
    """Refuse groups or steps of one where replies are compared with each other: every advantage would be zero."""
    config = recipe.train
    method, estimate = method_of(config.method), estimator(config.advantage.name, config.advantage.options)
    forks = credit_rule(recipe.credit).trains_futures and recipe.futures.rounds and recipe.futures.leaves > 1
    if forks or not method.credits_tokens or config.group_size > 1 or config.advantage.name not in estimators:
        return
    name = config.advantage.name
    if not _compares(estimate, prompts=4):
        raise UserError(
            f"train.group_size is 1, but '{name}' compares the replies to a prompt with each other: "
            "every advantage would be 0; set train.group_size to 2 or more, or train.method=ppo"
        )
    alone = config.prompts_per_step == 1 and credit_rule(recipe.credit).one_reward
    if alone and not _compares(estimate, prompts=1):
        raise UserError(
            f"train.group_size and train.prompts_per_step are 1, but '{name}' compares the replies of a step with each "
            "other: every advantage would be 0; set one of the two to 2 or more, or train.method=ppo"
        )


def _compares(estimate: Estimator, prompts: int) -> bool:
    """Whether single replies to this many prompts, each with a different reward, have advantages."""
    alone = [[Credit({MAIN: Score(1.0 + value)}, (Span(0, 1),))] for value in range(prompts)]
    return any(advantage for group in estimate(alone) for reply in group for advantage in reply)


def _check_reward(recipe: Recipe) -> None:
    """Refuse to learn from a number that is 0 whatever the policy says."""
    options = recipe.futures.options
    elsewhere = recipe.futures.name not in ("talk", "none") or not credit_rule(recipe.credit).one_reward
    if recipe.futures.name == "classmates":
        elsewhere = options.get("weight", 1.0) != 0 and options.get("gate") != "no_classmate"
    if elsewhere or any(metric.weight for metric in recipe.reward.metrics):
        return
    what = "all weights in reward.metrics are 0" if recipe.reward.metrics else "reward.metrics is empty"
    raise UserError(f"{what}: every reply would be worth 0, and nothing learned; name a metric with a weight")


def _check_thoughts(recipe: Recipe) -> None:
    """Refuse classmates and credit that wait for thoughts which nothing marks."""
    if recipe.episode.think is None and (key := thought_key(recipe)):
        raise UserError(f"{key}=thought needs markers in episode.think; set them, or {key}=all")
    waits = recipe.futures.name == "classmates" and recipe.futures.options.get("thought", "marked") == "marked"
    if waits and recipe.episode.think is None:
        raise UserError(
            "futures 'classmates' get the thought between the markers of episode.think, but it sets none; "
            "set them, or futures.thought=reply to hand on the whole reply"
        )


def thought_key(recipe: Recipe) -> str:
    """The key by which tokens of the thought are trained; empty where none is."""
    apart = (f"reward.metrics.{n}.tokens" for n, one in enumerate(recipe.reward.metrics) if one.tokens == "thought")
    return "credit.tokens" if recipe.credit.tokens == "thought" else next(apart, "")


def _check_evaluation(recipe: Recipe) -> None:
    """Its judge and its monitor are helper models, and the monitor predicts a score that is there."""
    models = {*recipe.models, *(read_map(recipe.futures.map_file)[0] if recipe.futures.map_file else ())}
    for key, name in (("judge", recipe.eval.judge), ("monitor", recipe.eval.monitor)):
        if name is not None and name not in models:
            raise UserError(
                f"eval.{key} is '{name}', which is not a model under `models`; {did_you_mean(name, models)}"
            )
    if recipe.eval.monitor is not None and METRIC not in (metric.name for metric in recipe.reward.metrics):
        raise UserError(f"eval.monitor predicts the metric '{METRIC}'; add it to reward.metrics (weight: 0 only logs)")


def _check_credit(recipe: Recipe) -> None:
    """Credit that nothing could come of; methods that learn from one number a reply refuse credit for spans of it."""
    name, futures = recipe.train.method, recipe.futures
    method = method_of(name)
    levels = [futures.samples] if isinstance(futures.samples, int) else futures.samples
    if len(levels) > max(futures.rounds, 1):
        raise UserError(
            f"futures.samples {levels} forks at {len(levels)} rounds, but futures.rounds is {futures.rounds}; "
            f"set as many rounds, or fewer forks"
        )
    rule = credit_rule(recipe.credit)
    if rule.trains_futures and futures.rounds and futures.leaves == 1 and method.compares:
        raise UserError(
            "credit.by 'tree' compares the futures of a reply with each other, but futures.samples is 1; "
            "set 2 or more, or credit.by=reply"
        )
    if method.credits_tokens or not method.samples:
        return
    if recipe.futures.name not in ("talk", "none"):
        raise UserError(f"train.method '{name}' takes one reward per reply; futures '{recipe.futures.name}' need rl")
    if not rule.one_reward or recipe.credit.tokens != "all":
        raise UserError(f"train.method '{name}' takes one reward per reply; `credit` by turns or tokens needs rl")
    apart = next((metric.name for metric in recipe.reward.metrics if metric.tokens != "all"), None)
    if apart is not None:
        raise UserError(f"train.method '{name}' takes one reward per reply; metric '{apart}' with tokens needs rl")
