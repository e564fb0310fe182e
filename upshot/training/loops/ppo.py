"""PPO: a value head tells what a reply is worth token by token; GAE makes advantages of its surprises.

Rewards stand where the credit says they were earned: at the end of each span of tokens what it is credited with beyond
the span after it, so that the rewards from a token to the end add up to what its span earned. A reply credited as a
whole has its reward on the last token. The KL penalty to the initial model, `train.kl.weight`, is taken off the reward
of every sampled token as kl x (log p_sampled - log p_initial); it is not in the loss a second time. Tokens that nobody
sampled (prompts, observations) and spans whose reward is missing are no time steps: the episode is its credited tokens,
one after another. Credited along the tree, a branch of the futures is an episode of its own with its reward at its end;
it needs no siblings, since the value head tells what was to be expected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from upshot.config.recipe import TrainConfig
from upshot.rewards.credit import Credit, Span
from upshot.rollout.rollout import Branch, Rollout
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.minibatches import Round
from upshot.training.loops.rl import Lesson, play_and_learn, round_of
from upshot.training.objectives.mismatch import LogprobSource, weigh
from upshot.training.objectives.objectives import Ppo
from upshot.training.objectives.surrogates.base import surrogate


async def train(run: LoopRun, config: TrainConfig) -> None:
    """Train from the run's step to `train.steps`."""
    surrogate(config.loss.name, config.loss.options)
    await play_and_learn(run, config, prepare, reference=bool(config.kl.weight), value_head=True)


def prepare(learner: Learner, groups: Sequence[Sequence[Rollout]]) -> Round:
    """What is learned from a step's replies."""
    lesson, logs = lesson_of(learner, groups)
    return round_of(lesson, lambda: Ppo(learner.config), logs)


def lesson_of(learner: LogprobSource, groups: Sequence[Sequence[Rollout]]) -> tuple[Lesson, Logs]:
    """What a step's replies teach, with values, targets, advantages and importance set, and what to log."""
    replies = [reply for group in groups for reply in group]
    kept = [(reply, part, earned) for reply in replies for part in _said(reply) if (earned := earnings(part.credit))]
    if not kept:
        return [], {}
    data = [_datum(part, earned) for _, part, earned in kept]
    logs = estimate(learner, data, [token_rewards(earned) for _, _, earned in kept])
    for (_, part, earned), datum in zip(kept, data, strict=True):
        spans = part.credit.spans if part.credit is not None else ()
        trained = {span for span, _ in earned}
        part.advantages = [_mean(datum.advantages[s.start : s.stop]) if s in trained else None for s in spans]
    return [(reply, datum) for (reply, _, _), datum in zip(kept, data, strict=True)], logs | weigh(learner, data)


def _said(reply: Rollout) -> list[Rollout | Branch]:
    return [reply, *(branch for fork in reply.siblings for branch in fork)]


def earnings(credit: Credit | None) -> list[tuple[Span, float]]:
    """The credited spans of a reply in order, and what each earned; those with nothing to learn from are left out."""
    if credit is None:
        return []
    totals = [(span, credit.total(span.parts).value) for span in credit.spans if span.parts]
    return sorted(((span, value) for span, value in totals if value is not None), key=lambda own: own[0].start)


def token_rewards(earned: Sequence[tuple[Span, float]]) -> list[float]:
    """The reward of each credited token before penalties: at the end of a span what it earned beyond the next one."""
    paid: list[float] = []
    for (span, value), (_, after) in zip(earned, [*earned[1:], (None, 0.0)], strict=True):
        paid += [0.0] * (span.stop - span.start - 1) + [value - after]
    return paid


def _datum(reply: Rollout | Branch, earned: Sequence[tuple[Span, float]]) -> Datum:
    """The reply, or a branch of its futures, as training data: trained are its credited spans."""
    conversation = reply.conversation
    mask = [0] * len(conversation.ids)
    for span, _ in earned:
        mask[span.start : span.stop] = [1] * (span.stop - span.start)
    datum = Datum(conversation.ids, mask, conversation.logprobs, source=reply)
    if isinstance(reply, Branch):
        datum.share, datum.counted = reply.share, False
    return datum


def estimate(learner: LogprobSource, data: Sequence[Datum], rewards: Sequence[Sequence[float]]) -> Logs:
    """Set values, targets and advantages of the data as the value head sees them now; what to log."""
    config = learner.config
    references = learner.logprobs(data, reference=True) if config.kl.weight else [datum.old for datum in data]
    divergence = 0.0
    for datum, values, reference, reward in zip(data, learner.values(data), references, rewards, strict=True):
        places = [i for i, bit in enumerate(datum.mask) if bit]
        ratios = [datum.old[i] - reference[i] for i in places]
        divergence += sum(ratios)
        paid = [own - config.kl.weight * ratio for own, ratio in zip(reward, ratios, strict=True)]
        advantages, targets = gae(paid, [values[i] for i in places], config.ppo.gamma, config.ppo.gae_lambda)
        datum.values = values
        datum.advantages = _spread(advantages, places, len(datum.ids))
        datum.returns = _spread(targets, places, len(datum.ids))
    logs = measure_values(data)
    if config.ppo.whiten:
        whiten(data)
    if config.kl.weight:
        logs["policy/kl_to_reference"] = divergence / max(sum(sum(datum.mask) for datum in data), 1)
    return logs


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float = 1.0, lam: float = 0.95
) -> tuple[list[float], list[float]]:
    """Advantages and value targets over the sampled tokens of one episode."""
    advantages = [0.0] * len(rewards)
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        running = rewards[t] + gamma * after - values[t] + gamma * lam * running
        advantages[t] = running
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def whiten(data: Sequence[Datum]) -> None:
    """Shift and scale the advantages of a step's sampled tokens to mean 0 and deviation 1."""
    found = [a for datum in data for a, bit in zip(datum.advantages, datum.mask, strict=True) if bit]
    mean = math.fsum(found) / len(found)
    deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in found) / len(found))
    for datum in data:
        pairs = zip(datum.advantages, datum.mask, strict=True)
        datum.advantages = [(a - mean) / (deviation + 1e-8) if bit else 0.0 for a, bit in pairs]


def measure_values(data: Sequence[Datum]) -> Logs:
    """Mean value and the share of the targets' variance that the value head explains."""
    pairs = [
        (value, target)
        for datum in data
        for value, target, bit in zip(datum.values, datum.returns, datum.mask, strict=True)
        if bit
    ]
    mean = math.fsum(target for _, target in pairs) / len(pairs)
    variance = math.fsum((target - mean) ** 2 for _, target in pairs)
    logs = {"value/mean": math.fsum(value for value, _ in pairs) / len(pairs), "value/target": mean}
    if variance > 0:
        errors = [target - value for value, target in pairs]
        error = math.fsum(errors) / len(errors)
        logs["value/explained"] = 1 - math.fsum((e - error) ** 2 for e in errors) / variance
    return logs


def _spread(values: Sequence[float], places: Sequence[int], length: int) -> list[float]:
    out = [0.0] * length
    for place, value in zip(places, values, strict=True):
        out[place] = value
    return out


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
