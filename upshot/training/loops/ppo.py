"""PPO: a value head tells what a reply is worth token by token; GAE makes advantages of its surprises.

Rewards stand where the credit says they were earned: at the end of each span of tokens what it is credited with beyond
the span after it, so that the rewards from a token to the end add up to what its span earned. A reply credited as a
whole has its reward on the last token. The KL penalty to the initial model, `train.kl.weight`, is taken off the reward
of every sampled token as kl x (log p_sampled - log p_initial); it is not in the loss a second time. Tokens that nobody
sampled (prompts, observations) and spans whose reward is missing are not time steps: the episode is its credited
tokens, one after another. Credited along the tree, a branch of the futures is an episode of its own with its reward at
its end; it needs no siblings, since the value head says what was to be expected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from upshot.rewards.credit import Credit, Span
from upshot.rollout.reply import Branch, Rollout
from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs
from upshot.training.loops.phase import Lesson
from upshot.training.loops.rl import Groups, RunRules, Units, as_units
from upshot.training.objectives.objectives import LogprobSource, PolicyGradient, normalise, set_importance


def prepare(learner: Learner, groups: Groups, rules: RunRules | None = None) -> Lesson:
    """Advantages, training data and loss of a step's replies; rules: the recipe's, if they are looked up already."""
    units, logs = training_data(learner, groups)
    return Lesson(units, partial(Ppo, learner.config, function=rules.surrogate if rules else None), logs)


def training_data(learner: LogprobSource, groups: Groups) -> tuple[Units, Logs]:
    """What a step's replies teach, with values, targets, advantages and importance set, and what to log."""
    units: Units = []
    earned: list[list[tuple[Span, float]]] = []
    for reply in (reply for group in groups for reply in group):
        parts: list[Rollout | Branch] = [reply, *(branch for fork in reply.siblings for branch in fork)]
        paid = [(part, spans) for part in parts if (spans := earnings(part.credit))]
        units += as_units([_datum(part, spans) for part, spans in paid])
        earned += [spans for _, spans in paid]
    data = list(chain.from_iterable(units))
    if not data:
        return [], {}
    logs = estimate(learner, data, [token_rewards(spans) for spans in earned])
    for datum, spans in zip(data, earned, strict=True):
        part, trained = datum.source, {span for span, _ in spans}
        assert part is not None and part.credit is not None
        part.advantages = [
            math.fsum(datum.advantages[s.start : s.stop]) / max(s.stop - s.start, 1) if s in trained else None
            for s in part.credit.spans
        ]
    return units, logs | set_importance(learner, data)


def earnings(credit: Credit | None) -> list[tuple[Span, float]]:
    """The credited spans of a reply in order, and what each earned; those with nothing to learn from are left out."""
    if credit is None:
        return []
    totals = [(span, credit.total(span.parts).value) for span in credit.spans if span.parts]
    return sorted(((span, value) for span, value in totals if value is not None), key=lambda earned: earned[0].start)


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
    share = reply.share if isinstance(reply, Branch) else 1.0
    counted = isinstance(reply, Rollout)
    return Datum(conversation.ids, mask, conversation.logprobs, share=share, counted=counted, source=reply)


def estimate(learner: LogprobSource, data: Sequence[Datum], rewards: Sequence[Sequence[float]]) -> Logs:
    """Set values, targets and advantages of the data as the value head sees them now; what to log."""
    config = learner.config
    references = learner.logprobs(data, reference=True) if config.kl.weight else [datum.old for datum in data]
    divergence = 0.0
    for datum, values, reference, reward in zip(data, learner.values(data), references, rewards, strict=True):
        ratios = [datum.old[place] - reference[place] for place in datum.places]
        divergence += sum(ratios)
        paid = [earned - config.kl.weight * ratio for earned, ratio in zip(reward, ratios, strict=True)]
        advantages, targets = gae(
            paid, [values[place] for place in datum.places], config.ppo.gamma, config.ppo.gae_lambda
        )
        datum.values = values
        datum.advantages, datum.returns = _spread(advantages, datum), _spread(targets, datum)
    logs = measure_values(data)
    if config.ppo.whiten:
        whiten(data)
    if config.kl.weight:
        logs["policy/kl_to_reference"] = divergence / max(sum(sum(datum.mask) for datum in data), 1)
    return logs


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
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
    trained = [datum.advantages[place] for datum in data for place in datum.places]
    mean = math.fsum(trained) / len(trained)
    deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in trained) / len(trained))
    for datum in data:
        scaled = [(datum.advantages[place] - mean) / (deviation + 1e-8) for place in datum.places]
        datum.advantages = _spread(scaled, datum)


def measure_values(data: Sequence[Datum]) -> Logs:
    """Mean value and the share of the targets' variance that the value head explains."""
    pairs = [(datum.values[place], datum.returns[place]) for datum in data for place in datum.places]
    mean = math.fsum(target for _, target in pairs) / len(pairs)
    variance = math.fsum((target - mean) ** 2 for _, target in pairs)
    logs = {"value/mean": math.fsum(value for value, _ in pairs) / len(pairs), "value/target": mean}
    if variance > 0:
        errors = [target - value for value, target in pairs]
        error = math.fsum(errors) / len(errors)
        logs["value/explained"] = 1 - math.fsum((e - error) ** 2 for e in errors) / variance
    return logs


def _spread(values: Sequence[float], datum: Datum) -> list[float]:
    """The values of the trained tokens beside the ids, 0 elsewhere."""
    out = [0.0] * len(datum.ids)
    for place, value in zip(datum.places, values, strict=True):
        out[place] = value
    return out


def clipped_value(values_M: Tensor, old_M: Tensor, targets_M: Tensor, clip: float) -> Tensor:
    """PPO's value loss per token: half the squared error, the larger of the plain and the clipped one."""
    near = old_M + (values_M - old_M).clamp(-clip, clip)
    return 0.5 * torch.maximum((values_M - targets_M).square(), (near - targets_M).square())


class Ppo(PolicyGradient):
    """The clipped surrogate and the value head's loss."""

    needs_values = True

    def loss(self, batch: TrainBatch, output: ForwardOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy loss + value_weight × value loss."""
        loss, logs = super().loss(batch, output)
        if output.values is None:
            raise ValueError("ppo needs the value head's output")
        columns = batch.columns
        errors = clipped_value(output.values, columns["values"], columns["returns"], self.config.clip.high)
        value_loss = normalise(errors, batch, self.by)
        logs["loss/value"] = value_loss.detach()
        return loss + self.config.ppo.value_weight * value_loss, logs
