"""Reinforcement learning on the policy's own replies. `train` is the step, top to bottom:

rows → rollouts → advantages → training data → loss → update → log. PPO and online DPO are the same loop with a
different `prepare`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from upshot.config.method import TrainingMethod
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.conversation import Row, derive_seed
from upshot.core.errors import UserError
from upshot.core.score import Reason, describe_missing
from upshot.rewards.advantages.grouped import Estimator, Step, estimator
from upshot.rewards.credit import MAIN
from upshot.rollout.blame import blame
from upshot.rollout.credit.rules import compared, measure_tree
from upshot.rollout.play import RolloutContext, play_step
from upshot.rollout.reply import Branch, Rollout
from upshot.training.learner.batch import Datum, data_of
from upshot.training.learner.distributed.ranks import ALONE, Ranks
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.dynamic_sampling import other_rows, replace_flat
from upshot.training.loops.evaluate import play_held_out
from upshot.training.loops.phase import Lesson, TrainingPhase, learn, pick
from upshot.training.metrics.pull import describe_pull
from upshot.training.metrics.step import missing_scores, summarise
from upshot.training.objectives.kl import charge_replies
from upshot.training.objectives.objectives import LogprobSource, PolicyGradient, Surrogate, set_importance, surrogate
from upshot.training.snapshots import RolloutSchedule, in_thread, staleness

Groups = Sequence[Sequence[Rollout]]
"""A step's replies, those to one prompt together."""
Compared = Sequence[Sequence[Rollout | Branch]]
"""What is compared with each other: replies to one prompt, or the branches of a fork."""
Progress = Callable[[int, int], None]
"""Called with the number of finished replies and the total."""
Units = list[list[Datum]]
"""Training data by unit. A unit is one reply with the branches of its futures; it is never split over minibatches."""
NOT_A_FAILURE = (Reason.NO_THOUGHT,)
"""A part missing for such a reason does not count towards `reward.max_missing`: nothing failed to be measured."""
NOTHING_TRAINED = (
    "they have scores, but no token to credit: credit.tokens, or a metric's tokens, is 'thought', and these replies "
    "have no thought between the markers of episode.think"
)
"""Why replies that have scores may still train nothing."""

CUT_SAMPLING = (
    "episode.top_p and top_k truncate sampling, but log-probabilities, ratios and gradients use the full distribution; "
    "tokens outside the cut are never sampled, so the gradient is slightly biased"
)
"""Printed when top_p or top_k is set."""


async def train(run: LoopRun, config: TrainConfig, method: TrainingMethod) -> None:
    """The training loop of all methods that learn from the policy's own replies."""
    recipe, policy = run.recipe, run.policy
    method.check(recipe)
    method.check_loss(recipe)
    rows = policy.fit_prompts(run.task.rows("train"))
    if not rows:
        raise UserError(f"task '{run.task.name}' has no rows in its split 'train'; check the options under `task`")
    phase = TrainingPhase(run, config, len(rows))
    if phase.is_finished:
        return  # before any helper is started
    if recipe.episode.top_p < 1 or recipe.episode.top_k:
        run.say(CUT_SAMPLING)
    async with run.open_services() as (services, context):
        learner, every_fork = phase.begin(), config.trains_every_fork
        prepare_lesson = method.prepare(learner.config)
        evaluate = partial(play_held_out, run, services, context)
        play_this = partial(play, recipe, context, rows, progress=run.show_progress, ranks=run.ranks)
        async with RolloutSchedule(play_this, policy.sampler, config.async_steps, phase.remaining_steps) as schedule:
            for step in phase.remaining_steps:
                started = time.perf_counter()
                groups, logs = await schedule.get(step)
                logs |= measure(groups, context, every_fork)
                if phase.evaluates(step):
                    logs |= await phase.evaluate(step, evaluate)
                    if phase.stopped:
                        phase.write_stop(logs)
                        break
                stop_if_missing(groups, recipe.reward.max_missing)
                if step == 0 and (pull := describe_pull(groups)):
                    run.say(pull)
                if recipe.reward.blamed == "worst":
                    logs |= blame(groups, context.futures)
                if config.async_steps:
                    logs |= staleness(groups, step)
                    schedule.start_next(step)
                await run.pause_helpers()
                seed = derive_seed(recipe.seed, "minibatches", step)
                with phase.learning(started, logs):
                    if config.async_steps:  # later steps are sampled meanwhile
                        logs |= await in_thread(partial(learn, learner, groups, seed, prepare_lesson))
                    else:
                        logs |= learn(learner, groups, seed, prepare_lesson)
                run.step_done(step + 1, logs, groups)
                await asyncio.sleep(0)  # Ctrl-C takes effect here: between steps, never inside one
        await phase.finish(evaluate)


async def play(
    recipe: Recipe, context: RolloutContext, rows: Sequence[Row], step: int, progress: Progress, ranks: Ranks = ALONE
) -> list[list[Rollout]]:
    """The replies of a step, grouped by row. Each rank plays its share of the groups and receives all of them."""
    config = recipe.train
    finished = total = 0

    def count(_: Rollout) -> None:
        nonlocal finished
        finished += 1
        progress(finished, total)

    groups: list[list[Rollout]] = []
    indices = pick(len(rows), config.prompts_per_step, step, recipe.seed)
    ids, tried = [row.id for row in rows], {rows[i].id for i in indices}
    for again in range(config.dynamic_sampling + 1):
        if again:  # other rows instead of those whose replies all earned the same
            indices = other_rows(groups, ids, tried, step, again, recipe.seed)
        if not indices:
            break
        groups_of_rank = ranks.own(len(indices))
        total += len(groups_of_rank) * config.group_size
        # The first time the seed is that of a run without dynamic sampling.
        seed = derive_seed(recipe.seed, "step", step, *([again] if again else []))
        played = await play_step(context, [rows[i] for i in indices], config.group_size, seed, count, groups_of_rank)
        played = await ranks.gather_own(f"play/{step}/{again}", played)
        if again:
            replace_flat(groups, played)
        else:
            groups = played
    return groups


def measure(groups: Groups, context: RolloutContext, every_fork: bool) -> Logs:
    """What to log about a step's replies: over all of them, over the tree, and what the kind of future adds.

    every_fork: as in `TrainConfig.trains_every_fork`.
    """
    replies = list(chain.from_iterable(groups))
    return summarise(groups) | measure_tree(replies, every_fork) | context.futures.measure(replies)


def stop_if_missing(groups: Groups, limit: float) -> None:
    """Stop the run if more than `limit` of the replies have no reward, or lack the same part of it; say why."""
    replies = list(chain.from_iterable(groups))
    lost = {"reward": 0}
    for reply in replies:
        lost["reward"] += reply.credit is None or not reply.credit.trains
        for name, part in reply.credit.parts.items() if reply.credit is not None else ():
            if part.is_missing and name != MAIN and part.reason not in NOT_A_FAILURE:
                lost[name] = lost.get(name, 0) + 1
    for name, count in lost.items():
        if count > limit * len(replies):
            reasons = ", ".join(describe_missing(missing_scores(replies))) or NOTHING_TRAINED
            raise UserError(
                f"{count} of {len(replies)} replies have no {name} ({reasons}); "
                f"fix the cause, or raise reward.max_missing ({limit:g})"
            )


class RunRules(NamedTuple):
    """The functions that a recipe names. Each run looks them up once, because a notebook may redefine them in
    between."""

    estimator: Estimator
    surrogate: Surrogate
    every_fork: bool
    """`TrainConfig.trains_every_fork`."""

    @classmethod
    def of(cls, config: TrainConfig) -> RunRules:
        """The rules of a recipe."""
        estimate = estimator(config.advantage.name, config.advantage.options)
        return cls(estimate, surrogate(config.loss.name, config.loss.options), config.trains_every_fork)


def prepare(learner: Learner, groups: Groups, estimate: bool = True, rules: RunRules | None = None) -> Lesson:
    """Advantages, training data and loss of a step's replies.

    estimate: if False, the replies' existing advantages are used. rules: those of the recipe; None looks them up.
    """
    config, rules = learner.config, rules or RunRules.of(learner.config)
    # With one update per step, the loss weights tokens by the log-probabilities of its own forward: none is added.
    weighted_in_loss = config.importance if config.importance.rule != "none" and config.minibatches == 1 else None
    units, logs = training_data(learner, groups, estimate, weighted_in_loss is None, rules)
    data = list(chain.from_iterable(units))
    if data and config.kl.weight and config.kl.where == "loss":
        for datum, reference in zip(data, learner.logprobs(data, reference=True), strict=True):
            datum.reference = reference
    return Lesson(units, partial(PolicyGradient, config, weighted_in_loss, rules.surrogate), logs)


def training_data(
    learner: LogprobSource, groups: Groups, estimate: bool = True, weighted: bool = True, rules: RunRules | None = None
) -> tuple[Units, Logs]:
    """A step's replies as training data with advantages, and what to log. estimate, rules: see `prepare`.

    weighted: whether importance weights are computed here, not in the loss.
    """
    config = learner.config
    charged = bool(config.kl.weight) and config.kl.where == "reward"
    if charged and not estimate:
        raise UserError(
            "train.kl.where=reward subtracts from rewards, but replies with given advantages have none; set it to loss"
        )
    credits, logs = charge_replies(learner, groups) if charged else (None, {})
    replies = list(chain.from_iterable(groups))
    if estimate:
        rules = rules or RunRules.of(config)
        set_advantages(groups, rules.estimator, credits)
        for forks in compared(replies, rules.every_fork):
            credits = charge_replies(learner, forks)[0] if charged else None
            set_advantages(forks, rules.estimator, credits)
    units = [unit for reply in replies for unit in as_units(data_of_episode(reply, config.length_norm))]
    if units and weighted:
        logs |= set_importance(learner, list(chain.from_iterable(units)))
    return units, logs


def set_advantages(groups: Compared, estimate: Estimator, credits: Step | None = None) -> None:
    """Set the advantages of every reply (or branch), span by span. They are estimated from `credits` if given, and from
    each reply's own credit if not."""
    credits = credits or [[reply.credit for reply in group] for group in groups]
    for group, advantages_of_group in zip(groups, estimate(credits), strict=True):
        for reply, advantages in zip(group, advantages_of_group, strict=True):
            reply.advantages = advantages
            # If a program played the episode, its other contexts get the episode's advantage.
            for path in reply.other_paths if isinstance(reply, Rollout) else ():
                of_episode = next((advantage for advantage in advantages if advantage is not None), None)
                path.advantages = [of_episode if span.parts else None for span in path.credit.spans]


def data_of_episode(reply: Rollout, length_norm: str = "token") -> list[Datum]:
    """Training data of a reply and of the branches of its futures, once they have advantages.

    An episode with several contexts counts as if its tokens were one sequence, under every `train.length_norm`.
    """
    first = data_of(reply)
    episode = [*first, *chain.from_iterable(map(data_of, reply.other_paths))]
    if len(episode) > len(first):
        tokens = sum(len(datum.places) for datum in episode)
        for index, datum in enumerate(episode):
            share = len(datum.places) / tokens if length_norm == "sequence" else 1.0
            counted = length_norm == "token" or not first or index < len(first)
            episode[index] = replace(datum, share=share, counted=counted)
    # Branches of a reply that is not trained count instead of it: a step of only those would divide by zero.
    branches = [branch for branch in chain.from_iterable(reply.siblings) if branch.advantages]
    return episode + [datum for branch in branches for datum in data_of(branch, branch.share, counted=not episode)]


def as_units(data: Sequence[Datum]) -> Units:
    """What stays in one minibatch: a reply together with what its futures add to its loss."""
    units: Units = []
    for datum in data:
        if datum.counted or not units:
            units.append([datum])
        else:
            units[-1].append(datum)
    return units
