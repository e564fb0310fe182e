"""The loop: reply → fork → continue → score → credit → learn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from upshot.chat import Row, derive_seed
from upshot.errors import UserError
from upshot.recipe import Recipe, TrainConfig
from upshot.rollout.play import Scene, play_step
from upshot.rollout.reply import Reply
from upshot.train.advantages import estimator, span_advantages
from upshot.train.batch import datum_of
from upshot.train.held_out import held_out, last_look, last_look_due
from upshot.train.learner import Learner
from upshot.train.objectives import PolicyGradient
from upshot.train.sft import pick
from upshot.train.summary import missing_reasons, summarise

if TYPE_CHECKING:
    from upshot.train.runner import Run

T = TypeVar("T")

Learn = Callable[[Learner, Sequence[Sequence[Reply]], int], dict[str, float]]
"""One round of updates on a step's groups, with a seed for the order of minibatches; what to log."""


async def train(run: Run, config: TrainConfig) -> None:
    """Policy gradient over groups, from the run's step to `train.steps`."""
    await play_and_learn(run, config, learn, reference=bool(config.kl))


async def play_and_learn(
    run: Run, config: TrainConfig, learn: Learn, reference: bool, value_head: bool = False
) -> None:
    """The loop of every method that learns from its own replies: play a round, learn from it, write it down."""
    recipe = run.recipe
    rows = run.task.rows("train")
    if not rows:
        raise UserError(f"task '{run.task.name}' has no rows in its split 'train'; look at the options under `task`")
    config = run.lasting(config, len(rows))
    if run.step and run.step >= config.steps and not last_look_due(run):
        return  # a finished run was resumed
    async with run.company() as (_, scene):
        learner = run.learner(config, value_head)
        if reference:
            run.keep_reference(learner)
        run.begin(learner, config)
        for step in range(run.step, config.steps):
            started = time.perf_counter()
            groups = await play(recipe, scene, rows, step, run.reporter.within)
            rolled = time.perf_counter()
            logs = summarise(groups, scene.weights) | await held_out(run, scene, step)
            stop_if_missing(groups, recipe.reward.max_missing)
            logs |= learn(learner, groups, derive_seed(recipe.seed, "minibatches", step))
            ended = time.perf_counter()
            logs |= {"time/rollout": rolled - started, "time/train": ended - rolled, "time/step": ended - started}
            run.step_done(step + 1, logs, groups)
            await asyncio.sleep(0)
        run.checkpoint()
        await last_look(run, scene)


async def play(
    recipe: Recipe, scene: Scene, rows: Sequence[Row], step: int, played: Callable[[int, int], None]
) -> list[list[Reply]]:
    """The replies of a step, grouped by row."""
    config = recipe.train
    chosen = [rows[i] for i in pick(len(rows), config.prompts_per_step, step, recipe.seed)]
    total = len(chosen) * config.group_size
    finished = 0

    def one(_: Reply) -> None:
        nonlocal finished
        finished += 1
        played(finished, total)

    return await play_step(scene, chosen, config.group_size, derive_seed(recipe.seed, "step", step), one)


def set_advantages(groups: Sequence[Sequence[Reply]], name: str) -> None:
    """Give every reply the advantages of its credit spans."""
    estimate = estimator(name)
    for group in groups:
        advantages = span_advantages([reply.credit for reply in group], estimate)
        for reply, own in zip(group, advantages, strict=True):
            reply.advantages = own


def stop_if_missing(groups: Sequence[Sequence[Reply]], limit: float) -> None:
    """A step in which too much is missing stops the run, with the reasons."""
    replies = [reply for group in groups for reply in group]
    missing = [reply for reply in replies if reply.reward.total.is_missing]
    if len(missing) > limit * len(replies):
        reasons = ", ".join(f"{count} x {reason}" for reason, count in missing_reasons(replies).items())
        raise UserError(
            f"{len(missing)} of {len(replies)} replies have no reward ({reasons}); "
            f"mend the cause, or raise reward.max_missing ({limit:g})"
        )


def learn(learner: Learner, groups: Sequence[Sequence[Reply]], seed: int) -> dict[str, float]:
    """One round of updates on a step's replies."""
    set_advantages(groups, learner.config.advantage)
    data = [datum for group in groups for reply in group if (datum := datum_of(reply)) is not None]
    if not data:
        return {"train/sequences": 0.0}
    config = learner.config
    if config.kl:
        for datum, reference in zip(data, learner.logprobs(data, reference=True), strict=True):
            datum.reference = reference
    logs: dict[str, float] = {}
    for part in minibatches(data, config.minibatches, seed):
        logs = learner.forward_backward([[datum] for datum in part], PolicyGradient(config))
        logs |= learner.step()
    logs["train/sequences"] = float(len(data))
    logs["train/tokens"] = float(sum(sum(datum.mask) for datum in data))
    return logs


def minibatches(data: Sequence[T], parts: int, seed: int) -> list[list[T]]:
    """A round's data in so many parts, shuffled by the seed."""
    order = pick(len(data), len(data), 0, seed) if parts > 1 else range(len(data))
    size = -(-len(data) // parts)
    return [[data[i] for i in order[start : start + size]] for start in range(0, len(data), size)]
