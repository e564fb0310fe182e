"""Held-out rows while training: the same stage, its own temperature, nothing learned.

A step's line has the evaluation of the weights before the step's update, so evaluation comes before learning: nothing
is awaited between an optimizer step and its line in the run folder, and Ctrl-C finds a consistent run.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from upshot.config.phases import WARM_START
from upshot.config.recipe import EvalConfig
from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError
from upshot.rewards.monitor import Monitor, case_of, measure
from upshot.rewards.monitor import MonitorPrediction as SeenCase
from upshot.rollout.context import RolloutContext
from upshot.rollout.play import play_step
from upshot.rollout.rollout import Rollout
from upshot.tasks.base import Task, groups_of
from upshot.training.learner.distributed.ranks import interleave
from upshot.training.loops.base import LoopRun
from upshot.training.metrics.best import BestTracker, only_looks
from upshot.training.metrics.step import by_group, summarise
from upshot.training.metrics.task import task_metrics

KEPT = ("reward/", "metric/", "missing/", "part/", "classmate/", "rollout/reply_tokens", "rollout/turns", "task/pass@")
Look = Callable[[], Awaitable[dict[str, float]]]
"""What evaluates the model as it is now."""


class Evaluator:
    """When the model is looked at, and what follows: the best checkpoint stays, or the training ends early."""

    def __init__(self, run: LoopRun) -> None:
        self.run = run
        self.config = run.recipe.eval if run.phase != WARM_START else EvalConfig()
        self.record = BestTracker.of(run.recipe, run.lines())

    @property
    def enough(self) -> bool:
        """Whether too many evaluations have passed without a new best."""
        return bool(self.config.stop_after) and self.record.since() >= self.config.stop_after

    @property
    def due(self) -> bool:
        """Whether the recipe evaluates and the run's last step has no line of nothing but its evaluation yet."""
        lines = self.run.lines(self.run.step)
        return bool(self.config.every) and not any(map(only_looks, lines))

    async def before(self, step: int, look: Look) -> dict[str, float]:
        """Metrics under `eval/` of the model after so many steps, when the recipe evaluates there."""
        return await self._look(step, look) if self.config.every and step % self.config.every == 0 else {}

    async def last(self, look: Look) -> None:
        """Evaluate the finished model, as a line of its own; an interrupted one is made up for when the run goes on."""
        if self.run.ranks.broadcast_object("last look", self.due):
            self.run.tell(await self._look(self.run.step, look))

    def end(self, logs: dict[str, float]) -> None:
        """Say that the training ends early, with the evaluation that decided it as a line of its own."""
        self.run.tell(logs)
        self.run.say(
            f"eval.stop_after: {self.record.since()} evaluations without a new best of {self.record.metric}; "
            f"training ends after step {self.run.step}"
        )

    async def _look(self, step: int, look: Look) -> dict[str, float]:
        started = time.perf_counter()
        logs = {f"eval/{key}": value for key, value in (await look()).items()}
        best = self.record.add(step, logs)
        if best is not None and self.run.recipe.train.save.best:
            self.run.checkpoint(best)
        return logs | {"time/eval": time.perf_counter() - started}


async def play_held_out(run: LoopRun, context: RolloutContext) -> dict[str, float]:
    """Rewards and metrics of the policy on the held-out rows."""
    config = run.recipe.eval
    calm = replace(context, policy=context.policy.at(config.temperature))
    rows = run.fitting(run.task.rows(config.split)[: config.rows])
    if not rows:
        raise UserError(f"task '{run.task.name}' has no rows in its split '{config.split}' (eval.split)")
    own = await play_step(
        calm, rows, config.samples, derive_seed(run.recipe.seed, "eval"), only=run.ranks.own(len(rows))
    )
    groups = interleave(await run.ranks.all_gather_object_async("eval", own))
    replies = [reply for group in groups for reply in group]
    watched = await _monitored(run, replies)
    return evaluated(groups, context, run.task) | {f"monitor/{key}": value for key, value in watched.items()}


def evaluated(groups: Sequence[Sequence[Rollout]], context: RolloutContext, task: Task) -> dict[str, float]:
    """What is logged of replies to held-out rows."""
    replies = [reply for group in groups for reply in group]
    found = summarise(groups) | context.futures.measure(replies)
    if any(len(group) > 1 for group in groups):
        found |= task_metrics(groups, task.groups)
    logs = {key: value for key, value in found.items() if key.startswith(KEPT)}
    return logs | by_group(
        replies, lambda reply: groups_of(task, reply.conversation.row), lambda reply: reply.reward.total
    )


async def _monitored(run: LoopRun, replies: Sequence[Rollout]) -> dict[str, float]:
    """How well the recipe's monitor predicts the verdicts from question and thought; nothing when it names none."""
    name, services = run.recipe.eval.monitor, run.services_now
    if name is None or services is None:
        return {}

    def label(reply: Rollout) -> str:
        row = reply.conversation.row
        return groups_of(run.task, row).get("task") or row.source or run.task.name

    cases = [case_of(reply.conversation, reply.reward, run.task, services.manager, label(reply)) for reply in replies]
    looks = await Monitor(services.models[name]).look_at_all([cases[i] for i in run.ranks.own(len(cases))])
    predicted = interleave(await run.ranks.all_gather_object_async("monitor", [look.prediction for look in looks]))
    return measure([SeenCase(case, prediction) for case, prediction in zip(cases, predicted, strict=True)])
