"""Held-out rows while training: the same stage, its own temperature, nothing learned.

A step's line has the evaluation of the weights that played the step's rollouts, so evaluation comes before learning:
nothing is awaited between an optimizer step and its line in the run folder, and Ctrl-C finds a consistent run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from upshot.chat import derive_seed
from upshot.rewards.monitor import Monitor, case_of, measure
from upshot.rollout.play import play_step
from upshot.rollout.reply import Reply
from upshot.rollout.stage import Stage
from upshot.tasks.base import groups_of
from upshot.train.summary import by_group, summarise

if TYPE_CHECKING:
    from upshot.train.runner import Run

KEPT = ("reward/", "metric/", "missing/", "part/", "classmate/", "rollout/reply_tokens", "rollout/turns")
ONLY = ("eval/", "time/eval")
"""What a line of nothing but an evaluation has."""


async def held_out(run: Run, stage: Stage, step: int) -> dict[str, float]:
    """Metrics on the validation split under `eval/`, when the recipe evaluates after this many steps."""
    config = run.recipe.eval
    return await _play(run, stage) if config.every and step % config.every == 0 else {}


async def last_look(run: Run, stage: Stage) -> None:
    """Evaluate the finished model, as a line of its own; an interrupted one is made up for when the run goes on."""
    if last_look_due(run):
        logs = await _play(run, stage)
        run.writer.line(run.phase, run.step, logs)
        run.writer.announce(run.phase, run.step, logs)


def last_look_due(run: Run) -> bool:
    """Whether the recipe evaluates and the run's last step has no line of nothing but its evaluation yet."""
    lines = run.folder.lines(run.phase, run.step)
    looked = (all(key in ("phase", "step") or key.startswith(ONLY) for key in line) for line in lines)
    return bool(run.recipe.eval.every) and not any(looked)


async def _play(run: Run, stage: Stage) -> dict[str, float]:
    config = run.recipe.eval
    started = time.perf_counter()
    calm = replace(stage, policy=stage.policy.at(config.temperature))
    rows = list(run.task.rows("validation")[: config.rows])
    groups = await play_step(calm, rows, 1, derive_seed(run.recipe.seed, "eval"))
    replies = [reply for group in groups for reply in group]
    found = summarise(groups) | stage.futures.measure(replies)
    logs = {key: value for key, value in found.items() if key.startswith(KEPT)}
    logs |= by_group(
        replies,
        lambda reply: groups_of(run.task, reply.conversation.row),
        lambda reply: reply.reward.total,
    )
    logs |= {f"monitor/{key}": value for key, value in (await _monitored(run, replies)).items()}
    return {f"eval/{key}": value for key, value in logs.items()} | {"time/eval": time.perf_counter() - started}


async def _monitored(run: Run, replies: Sequence[Reply]) -> dict[str, float]:
    """How well the recipe's monitor predicts the verdicts from question and thought; nothing when it names none."""
    name, company = run.recipe.eval.monitor, run.company_now
    if name is None or company is None:
        return {}

    def label(reply: Reply) -> str:
        row = reply.conversation.row
        return groups_of(run.task, row).get("task") or row.source or run.task.name

    cases = [case_of(reply, run.task, company.manager, label(reply)) for reply in replies]
    return measure(await Monitor(company.models[name]).look_at_all(cases))
