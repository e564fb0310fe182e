"""The loop: reply → fork → continue → score → credit → learn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from upshot.config.recipe import Named, Recipe, TrainConfig
from upshot.core.conversation import Row, derive_seed
from upshot.core.errors import UserError
from upshot.core.score import Reason, tell_missing
from upshot.core.stopwatch import Stopwatch
from upshot.rewards.advantages.base import estimator
from upshot.rewards.credit import MAIN, Credit
from upshot.rollout.context import RolloutContext
from upshot.rollout.play import play_step
from upshot.rollout.rollout import Rollout
from upshot.training.learner.batch import data_of
from upshot.training.learner.distributed.ranks import ALONE, Ranks, interleave
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import LoopRun
from upshot.training.loops.dynamic_sampling import play_until_varied
from upshot.training.loops.evaluate import Evaluator, play_held_out
from upshot.training.loops.rollouts import RolloutSchedule, StepRollouts, staleness
from upshot.training.loops.sft import pick
from upshot.training.metrics.step import missing_scores, summarise
from upshot.training.metrics.throughput import sampled
from upshot.training.objectives.importance import weigh
from upshot.training.objectives.kl import charged
from upshot.training.objectives.logprob_source import Lesson, LogprobSource
from upshot.training.objectives.mismatch import MismatchObjective, known
from upshot.training.objectives.objectives import PolicyGradient
from upshot.training.objectives.surrogates.base import surrogate

T = TypeVar("T")

OWN_DOING = (Reason.NO_THOUGHT,)
"""Reasons for a missing part that are the policy's own doing, not a failure to measure."""

Learn = Callable[[Learner, Sequence[Sequence[Rollout]], int], dict[str, float]]
"""One round of updates on a step's groups, with a seed for the order of minibatches; what to log."""


async def train(run: LoopRun, config: TrainConfig) -> None:
    """Policy gradient over groups, from the run's step to `train.steps`."""
    surrogate(config.loss.name, config.loss.options)
    await play_and_learn(run, config, learn, reference=bool(config.kl.weight))


async def play_and_learn(
    run: LoopRun, config: TrainConfig, learn: Learn, reference: bool, value_head: bool = False
) -> None:
    """The loop of every method that learns from its own replies: play a round, learn from it, write it down."""
    recipe = run.recipe
    rows = run.fitting(run.task.rows("train"))
    if not rows:
        raise UserError(f"task '{run.task.name}' has no rows in its split 'train'; look at the options under `task`")
    config = run.lasting(config, len(rows))
    looks = Evaluator(run)
    if looks.enough or (run.step and run.step >= config.steps and not looks.due):
        return  # a finished run was resumed
    async with run.services() as (_, context):
        learner = run.learner(config, value_head)
        if reference:
            run.keep_reference(learner)
        run.begin(learner, config)
        steps, ahead = range(run.step, config.steps), config.async_steps

        def playing(step: int) -> Coroutine[Any, Any, StepRollouts]:
            return timed_play(recipe, context, rows, step, run.within, run.ranks)

        def look() -> Awaitable[dict[str, float]]:
            return play_held_out(run, context)

        async with RolloutSchedule(playing, run.loaded.sampler, context.futures, ahead, steps) as rollouts:
            for step in steps:
                with run.meter.step() as times:
                    played = await rollouts.of(step)
                    groups = played.groups
                    logs = played.times | summarise(groups) | measure(groups, context)
                    logs |= run.loaded.sync_times() | (staleness(groups, step) if ahead else {})
                    evaluation = await looks.before(step, look)
                    if looks.enough:
                        looks.end(evaluation)
                        break
                    stop_if_missing(groups, recipe.reward.max_missing)
                    run.count()
                    await rollouts.go_on(step)
                    seed = derive_seed(recipe.seed, "minibatches", step)
                    await run.loaded.rest()
                    with run.ranks.update(), times.learning(learner):
                        logs |= evaluation | await rollouts.learn(partial(learn, learner, groups, seed))
                run.step_done(step + 1, logs | times.logs, groups)
                await asyncio.sleep(0)
        run.checkpoint()
        await looks.last(look)


async def timed_play(
    recipe: Recipe,
    context: RolloutContext,
    rows: Sequence[Row],
    step: int,
    played: Callable[[int, int], None],
    ranks: Ranks = ALONE,
) -> StepRollouts:
    """The replies of a step and where the time went that they took."""
    started = time.perf_counter()
    with Stopwatch().running() as watch:
        groups = await play(recipe, context, rows, step, played, ranks)
    took = time.perf_counter() - started
    times = {f"time/{name}": watch.seconds[name] for name in ("sample", "futures", "judges") if watch.seconds[name]}
    tokens = sampled(reply for group in groups for reply in group)
    return StepRollouts(groups, times | {"time/rollout": took, "time/sampled_per_s": tokens / max(took, 1e-9)})


async def play(
    recipe: Recipe,
    context: RolloutContext,
    rows: Sequence[Row],
    step: int,
    played: Callable[[int, int], None],
    ranks: Ranks = ALONE,
) -> list[list[Rollout]]:
    """The replies of a step, grouped by row; each rank plays some groups and gets all."""
    config = recipe.train
    finished = total = 0

    def one(_: Rollout) -> None:
        nonlocal finished
        finished += 1
        played(finished, total)

    async def play_round(some: Sequence[int], number: int) -> list[list[Rollout]]:
        nonlocal total
        own = ranks.own(len(some))
        total += len(own) * config.group_size
        seed = derive_seed(recipe.seed, "step", step, *([number] if number else []))
        groups = await play_step(context, [rows[i] for i in some], config.group_size, seed, one, own)
        return interleave(await ranks.all_gather_object_async(f"play/{step}/{number}", groups))

    first = pick(len(rows), config.prompts_per_step, step, recipe.seed)
    more = others([row.id for row in rows], first, step, recipe.seed)
    return await play_until_varied(play_round, more, first, config.dynamic_sampling)


def others(ids: Sequence[str], first: Sequence[int], step: int, seed: int) -> Callable[[int, int], Sequence[int]]:
    """What chooses so many rows for a round, none that the step has had; rows are told by their place in `ids`."""
    seen = {ids[place] for place in first}

    def more(count: int, number: int) -> Sequence[int]:
        order = pick(len(ids), len(ids), 0, derive_seed(seed, "more", step, number))
        new = [place for place in order if ids[place] not in seen][:count]
        seen.update(ids[place] for place in new)
        return new

    return more


def measure(groups: Sequence[Sequence[Rollout]], context: RolloutContext) -> dict[str, float]:
    """What the kind of future itself reports of a step."""
    return context.futures.measure([reply for group in groups for reply in group])


def set_advantages(
    groups: Sequence[Sequence[Rollout]], named: Named, credits: Sequence[Sequence[Credit | None]] | None = None
) -> None:
    """Give every reply the advantages of its credit spans, or of those in `credits`."""
    estimate = estimator(named.name, named.options)
    advantages = estimate(credits or [[reply.credit for reply in group] for group in groups])
    for group, own in zip(groups, advantages, strict=True):
        for reply, spans in zip(group, own, strict=True):
            reply.advantages = spans


def stop_if_missing(groups: Sequence[Sequence[Rollout]], limit: float) -> None:
    """A step in which too much is missing stops the run, with the reasons."""
    replies = [reply for group in groups for reply in group]
    silent = sum(reply.credit is None or not reply.credit.trains for reply in replies)
    lost = {"reward": silent}
    for reply in replies:
        for name, part in reply.credit.parts.items() if reply.credit is not None else ():
            if part.is_missing and name != MAIN and part.reason not in OWN_DOING:
                lost[name] = lost.get(name, 0) + 1
    for name, count in lost.items():
        if count > limit * len(replies):
            reasons = ", ".join(tell_missing(missing_scores(replies)))
            raise UserError(
                f"{count} of {len(replies)} replies have no {name} ({reasons}); "
                f"mend the cause, or raise reward.max_missing ({limit:g})"
            )


def lesson_of(learner: LogprobSource, groups: Sequence[Sequence[Rollout]]) -> tuple[Lesson, dict[str, float]]:
    """What a step's replies teach, with advantages and importance set, and what to log."""
    config = learner.config
    credits, logs = charged(learner, groups) if config.kl.weight and config.kl.where == "reward" else (None, {})
    set_advantages(groups, config.advantage, credits)
    lesson = [(reply, datum) for group in groups for reply in group for datum in data_of(reply)]
    return lesson, logs | (weigh(learner, [datum for _, datum in lesson]) if lesson else {})


def learn(learner: Learner, groups: Sequence[Sequence[Rollout]], seed: int) -> dict[str, float]:
    """One round of updates on a step's replies."""
    config = learner.config
    lesson, logs = lesson_of(learner, groups)
    data = [datum for _, datum in lesson]
    if not data:
        return logs | {"train/sequences": 0.0}
    if config.kl.weight and config.kl.where == "loss":
        for datum, reference in zip(data, learner.logprobs(data, reference=True), strict=True):
            datum.reference = reference
    drift = known(logs)
    for part in minibatches(data, config.minibatches, seed):
        objective = MismatchObjective(PolicyGradient(config))
        logs |= learner.forward_backward([[datum] for datum in part], objective)
        # Of the first: later ones have other weights than the sampler had.
        drift = drift or objective.drift(learner.ranks)
        logs |= learner.step() | drift
    logs["train/sequences"] = float(len(data))
    logs["train/tokens"] = float(sum(sum(datum.mask) for datum in data))
    return logs


def minibatches(data: Sequence[T], parts: int, seed: int) -> list[list[T]]:
    """A round's data in so many parts, shuffled by the seed."""
    order = pick(len(data), len(data), 0, seed) if parts > 1 else range(len(data))
    size = -(-len(data) // parts)
    return [[data[i] for i in order[start : start + size]] for start in range(0, len(data), size)]
