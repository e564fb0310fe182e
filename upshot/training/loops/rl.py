"""The loop: reply → fork → continue → score → credit → learn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from upshot.config.recipe import Named, Recipe, TrainConfig
from upshot.core.conversation import Row, derive_seed
from upshot.core.errors import UserError
from upshot.core.score import Reason, tell_missing
from upshot.rewards.advantages.base import estimator
from upshot.rewards.credit import MAIN, Credit
from upshot.rollout.blame import blame
from upshot.rollout.context import RolloutContext
from upshot.rollout.play import play_step
from upshot.rollout.rollout import Branch, Rollout
from upshot.rollout.tree import compared
from upshot.training.learner.batch import Datum, data_of
from upshot.training.learner.distributed.ranks import ALONE, Ranks, interleave
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.dynamic_sampling import play_until_varied
from upshot.training.loops.evaluate import play_held_out
from upshot.training.loops.minibatches import Round, pick, update
from upshot.training.loops.phase import Step, TrainingPhase
from upshot.training.loops.rollouts import RolloutSchedule, staleness
from upshot.training.metrics.pull import tell_pull
from upshot.training.metrics.step import missing_scores, summarise
from upshot.training.objectives.kl import charge_replies
from upshot.training.objectives.mismatch import LogprobSource, weigh
from upshot.training.objectives.objectives import Objective, PolicyGradient
from upshot.training.objectives.surrogates.base import surrogate

Lesson = list[tuple[Rollout, Datum]]
"""What is learned from a step's replies, each sequence with the reply that it is of."""
Prepare = Callable[[Learner, Sequence[Sequence[Rollout]]], Round]
"""What a method learns from a step's groups."""
OWN_DOING = (Reason.NO_THOUGHT,)
"""Reasons for a missing part that are the policy's own doing, not a failure to measure."""
NOTHING_TRAINED = (
    "their scores are there, but none of their tokens earns one: with credit.tokens or a metric's tokens=thought, no "
    "reply has a thought between the markers of episode.think"
)
"""Why replies are lost whose scores are not."""


async def train(run: LoopRun, config: TrainConfig) -> None:
    """Policy gradient over groups, from the run's step to `train.steps`."""
    surrogate(config.loss.name, config.loss.options)
    await play_and_learn(run, config, prepare, reference=bool(config.kl.weight))


async def play_and_learn(
    run: LoopRun, config: TrainConfig, prepare: Prepare, reference: bool, value_head: bool = False
) -> None:
    """The loop of every method that learns from its own replies: play a round, learn from it, write it down."""
    recipe, policy = run.recipe, run.policy
    rows = policy.fit_prompts(run.task.rows("train"))
    if not rows:
        raise UserError(f"task '{run.task.name}' has no rows in its split 'train'; look at the options under `task`")
    phase = TrainingPhase(run, config, len(rows))
    if phase.over:
        return  # before any helper is started
    async with run.open_services() as (services, context):
        learner = phase.begin(reference, value_head)
        left, ahead = range(run.step, phase.config.steps), config.async_steps

        def play_rows(step: int) -> Coroutine[Any, Any, list[list[Rollout]]]:
            return play(recipe, context, rows, step, run.show_progress, run.ranks)

        async def play_next(step: Step) -> None:
            step.groups, times = await schedule.get(step.number)
            step.logs = times | summarise(step.groups) | measure(step.groups, context)
            step.logs |= policy.sync_times() | (staleness(step.groups, step.number) if ahead else {})

        def evaluate() -> Awaitable[Logs]:
            return play_held_out(run, services, context)

        async with RolloutSchedule(play_rows, policy.sampler, ahead, left) as schedule:
            async for step in phase.steps(evaluate, play_next):
                stop_if_missing(step.groups, recipe.reward.max_missing)
                if step.number == 0 and (pull := tell_pull(step.groups)):
                    run.say(pull)
                if recipe.reward.blamed == "worst":
                    step.logs |= blame(step.groups, context.futures)
                run.count_services()
                schedule.start_next(step.number)
                await policy.rest()
                seed = derive_seed(recipe.seed, "minibatches", step.number)
                with step.learning():
                    learned = await schedule.learn(partial(learn, learner, step.groups, seed, prepare))
                    step.logs |= step.evaluation | learned
        await phase.finish(evaluate)


async def play(
    recipe: Recipe,
    context: RolloutContext,
    rows: Sequence[Row],
    step: int,
    show_progress: Callable[[int, int], None],
    ranks: Ranks = ALONE,
) -> list[list[Rollout]]:
    """The replies of a step, grouped by row; each rank plays some groups and gets all."""
    config = recipe.train
    finished = total = 0

    def count(_: Rollout) -> None:
        nonlocal finished
        finished += 1
        show_progress(finished, total)

    async def play_round(some: Sequence[int], number: int) -> list[list[Rollout]]:
        nonlocal total
        own = ranks.own(len(some))
        total += len(own) * config.group_size
        seed = derive_seed(recipe.seed, "step", step, *([number] if number else []))
        groups = await play_step(context, [rows[i] for i in some], config.group_size, seed, count, own)
        return interleave(await ranks.all_gather_object_async(f"play/{step}/{number}", groups))

    first = pick(len(rows), config.prompts_per_step, step, recipe.seed)
    more = other_rows([row.id for row in rows], first, step, recipe.seed)
    return await play_until_varied(play_round, more, first, config.dynamic_sampling)


def other_rows(ids: Sequence[str], first: Sequence[int], step: int, seed: int) -> Callable[[int, int], Sequence[int]]:
    """What chooses so many rows for a round, none that the step has had; rows are told by their place in `ids`."""
    seen = {ids[place] for place in first}

    def more(count: int, number: int) -> Sequence[int]:
        order = pick(len(ids), len(ids), 0, derive_seed(seed, "more", step, number))
        new = [place for place in order if ids[place] not in seen][:count]
        seen.update(ids[place] for place in new)
        return new

    return more


def measure(groups: Sequence[Sequence[Rollout]], context: RolloutContext) -> Logs:
    """What the kind of future itself reports of a step."""
    return context.futures.measure([reply for group in groups for reply in group])


def set_advantages(
    groups: Sequence[Sequence[Rollout | Branch]],
    named: Named,
    credits: Sequence[Sequence[Credit | None]] | None = None,
) -> None:
    """Give every reply, or every branch of a fork, the advantages of its credit spans, or of those in `credits`."""
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
            reasons = ", ".join(tell_missing(missing_scores(replies))) or NOTHING_TRAINED
            raise UserError(
                f"{count} of {len(replies)} replies have no {name} ({reasons}); "
                f"mend the cause, or raise reward.max_missing ({limit:g})"
            )


def lesson_of(
    learner: LogprobSource, groups: Sequence[Sequence[Rollout]], estimate: bool = True, weighed: bool = True
) -> tuple[Lesson, Logs]:
    """What a step's replies teach, with advantages and importance set, and what to log.

    Without `estimate` the replies' advantages are somebody's own, and stay as they are; without `weighed` the update
    itself weighs tokens.
    """
    config = learner.config
    charged = bool(config.kl.weight) and config.kl.where == "reward"
    if charged and not estimate:
        raise UserError("train.kl.where is 'reward', but advantages that are given have no reward to take it off")
    credits, logs = charge_replies(learner, groups) if charged else (None, {})
    replies = [reply for group in groups for reply in group]
    if estimate:
        set_advantages(groups, config.advantage, credits)
        for reply in replies:
            share_advantage(reply)
        for forks in compared(replies):
            set_advantages(forks, config.advantage, charge_replies(learner, forks)[0] if charged else None)
    lesson = [(reply, datum) for reply in replies for datum in teach(reply, config.length_norm)]
    return lesson, logs | (weigh(learner, [datum for _, datum in lesson]) if lesson and weighed else {})


def share_advantage(reply: Rollout) -> None:
    """Give the other contexts of a program's episode the advantage of the episode, which they are parts of."""
    found = next((advantage for advantage in reply.advantages if advantage is not None), None)
    for path in reply.other_paths:
        path.advantages = [found if span.parts else None for span in path.credit.spans]


def teach(reply: Rollout, length_norm: str = "token") -> list[Datum]:
    """What a reply and the branches of its futures teach, their advantages being set.

    An episode of several contexts counts as one whose tokens stand in one sequence, under every `train.length_norm`.
    """
    own = data_of(reply)
    parts = [datum for path in reply.other_paths for datum in data_of(path)]
    tokens = sum(len(datum.places) for datum in own + parts)
    for datum in parts:
        datum.share, datum.counted = 1.0, length_norm == "token" or not own
    for datum in own + parts if parts and length_norm == "sequence" else ():
        datum.share *= len(datum.places) / tokens
    own += parts
    below = [datum for fork in reply.siblings for branch in fork if branch.advantages for datum in data_of(branch)]
    for datum in below if not own else ():
        datum.counted = True  # there is no reply to add their loss to: a step of such alone would divide by nothing
    return own + below


def prepare(learner: Learner, groups: Sequence[Sequence[Rollout]], estimate: bool = True) -> Round:
    """What is learned from a step's replies; `estimate`: see `lesson_of`."""
    config = learner.config
    passing = config.importance if config.importance.rule != "none" and config.minibatches == 1 else None
    lesson, logs = lesson_of(learner, groups, estimate, weighed=passing is None)
    data = [datum for _, datum in lesson]
    if data and config.kl.weight and config.kl.where == "loss":
        for datum, reference in zip(data, learner.logprobs(data, reference=True), strict=True):
            datum.reference = reference
    return round_of(lesson, lambda: PolicyGradient(config, passing), logs)


def learn(learner: Learner, groups: Sequence[Sequence[Rollout]], seed: int, prepare: Prepare = prepare) -> Logs:
    """One round of updates on a step's replies; `seed`: for the order of minibatches."""
    return update(learner, prepare(learner, groups), seed)


def round_of(lesson: Lesson, objective: Callable[[], Objective], logs: Logs) -> Round:
    """A lesson as a round of updates."""
    counts = {"train/sequences": float(len(lesson))}
    if lesson:
        counts["train/tokens"] = float(sum(sum(datum.mask) for _, datum in lesson))
    return Round(units_of(lesson), objective, logs, counts)


def units_of(lesson: Lesson) -> list[list[Datum]]:
    """What stays in one minibatch: every sequence for itself, what the futures add to a reply's loss with the reply."""
    units: list[tuple[Rollout, list[Datum]]] = []
    for reply, datum in lesson:
        if not datum.counted and units and units[-1][0] is reply:
            units[-1][1].append(datum)
        else:
            units.append((reply, [datum]))
    return [unit for _, unit in units]
