"""Held-out examples while training: rows are played in the same context at a temperature of their own.

Nothing is learned, and there is no dropout. When they are played, and what follows: `phase.py`. The losses of held-out
examples stand beside their loops; what those have in common is at the end of this file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain

from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError
from upshot.rewards.monitor import Monitor, MonitorPrediction, case_of, measure
from upshot.rollout.play import RolloutContext, play_step
from upshot.rollout.reply import Rollout
from upshot.rollout.services import Services, build_held_out
from upshot.tasks.base import Task, groups_of
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.metrics.best import HELD_OUT
from upshot.training.metrics.step import by_group, summarise, task_metrics


async def play_held_out(run: LoopRun, services: Services, context: RolloutContext) -> Logs:
    """Rewards and metrics of the policy on the held-out rows."""
    config = run.recipe.eval
    context = build_held_out(run.recipe, services, context)
    rows = run.policy.fit_prompts(run.task.rows(config.split)[: config.rows])
    if not rows:
        raise UserError(f"task '{run.task.name}' has no rows in its split '{config.split}' (eval.split)")
    seed = derive_seed(run.recipe.seed, "eval")
    groups_of_rank = await play_step(context, rows, config.samples, seed, only=run.ranks.own(len(rows)))
    groups = await run.ranks.gather_own("eval", groups_of_rank)
    replies = list(chain.from_iterable(groups))
    watched = await _ask_monitor(run, services, replies) if config.monitor is not None else {}
    return summarise_held_out(groups, context, run.task) | {f"monitor/{key}": value for key, value in watched.items()}


def summarise_held_out(groups: Sequence[Sequence[Rollout]], context: RolloutContext, task: Task) -> Logs:
    """What is logged of replies to held-out rows."""
    replies = list(chain.from_iterable(groups))
    numbers = summarise(groups) | context.futures.measure(replies)
    if any(len(group) > 1 for group in groups):
        numbers |= task_metrics(groups, partial(groups_of, task))
    logs = {key: value for key, value in numbers.items() if key.startswith(HELD_OUT)}
    return logs | by_group(replies, [groups_of(task, reply.conversation.row) for reply in replies], every_score=True)


async def _ask_monitor(run: LoopRun, services: Services, replies: Sequence[Rollout]) -> Logs:
    """How well the recipe's monitor predicts the verdicts from question and thought."""

    def label(reply: Rollout) -> str:
        row = reply.conversation.row
        return groups_of(run.task, row).get("task") or row.source or run.task.name

    manager = (services.held_out or services).manager
    cases = [case_of(reply.conversation, reply.reward, run.task, manager, label(reply)) for reply in replies]
    monitor = Monitor(services.models[str(run.recipe.eval.monitor)])
    seen = await monitor.look_at_all([cases[i] for i in run.ranks.own(len(cases))])
    predicted = await run.ranks.gather_own("monitor", [one.prediction for one in seen])
    return measure([MonitorPrediction(case, prediction) for case, prediction in zip(cases, predicted, strict=True)])


def gains(learner: Learner, data: Sequence[Datum]) -> list[float]:
    """How much more probable each reply is to the policy than to the reference, in nats."""
    policy, reference = learner.logprobs(data), learner.logprobs(data, reference=True)
    return [sum_trained(a, d) - sum_trained(b, d) for a, b, d in zip(policy, reference, data, strict=True)]


def sum_trained(logprobs: Sequence[float], datum: Datum) -> float:
    """The log-probability of a sequence's trained tokens together."""
    return math.fsum(p for p, bit in zip(logprobs, datum.mask, strict=True) if bit)
