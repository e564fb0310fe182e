"""KTO: learning from single replies marked good or bad, without pairs (Ethayarajh et al., arXiv 2402.01306).

A good reply should gain probability over the reference, a bad one lose it, each measured against how far the policy has
moved on replies that do not answer their prompt: the mean log ratio of prompts with another row's reply. The loss is
that of TRL 1.16's `KTOTrainer` (loss_type "kto"); what TRL calls a batch is one step here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from upshot.config.method import TrainingMethod
from upshot.config.recipe import KTOConfig, TrainConfig
from upshot.models.rendering import Renderer
from upshot.tasks.datasets.records import MarkedReply
from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.dpo import reply_datum
from upshot.training.loops.evaluate import gains
from upshot.training.loops.phase import Lesson, learn_examples
from upshot.training.objectives.objectives import Objective


def kto_losses(gained_S: Tensor, good_S: Tensor, divergence: float, config: KTOConfig) -> Tensor:
    """[sequences] The loss of each reply, from how much its log-probability gained over the reference."""
    sign = torch.where(good_S, 1.0, -1.0)
    weight = torch.where(good_S, config.desirable_weight, config.undesirable_weight)
    return weight * (1 - torch.sigmoid(config.beta * sign * (gained_S - divergence)))


class Kto(Objective):
    """The loss over a step's replies. A datum's `advantages` are 1 where its reply is good and -1 where it is bad."""

    def __init__(self, config: KTOConfig, divergence: float) -> None:
        self.config, self.divergence = config, divergence

    def begin(self, data: Sequence[Datum], max_tokens: int, mode: str) -> None:
        """Count the good and the bad replies of the step."""
        super().begin(data, max_tokens, mode)
        good = sum(_is_good(datum) for datum in data)
        self.count = {"kto/good": good, "kto/bad": len(data) - good}

    def weight(self, name: str) -> float:
        """All that is logged are means over replies."""
        return self.count.get(name, self.by.sequences)

    def loss(self, batch: TrainBatch, output: ForwardOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over replies; β times the gains of the good and of the bad ones, each where there are any."""
        gained = batch.sums(output.logprobs) - batch.sums(batch.columns["reference"])
        good = batch.sums(batch.columns["advantages"]) > 0
        loss = kto_losses(gained, good, self.divergence, self.config).sum() / max(self.by.sequences, 1)
        rewards = self.config.beta * gained.detach()
        logs = {"loss/kto": loss.detach()}
        for name, marked in (("kto/good", good), ("kto/bad", ~good)):
            if self.count[name]:
                logs[name] = (rewards * marked).sum() / self.count[name]
        return loss, logs


async def train(run: LoopRun, config: TrainConfig, method: TrainingMethod) -> None:
    """Learn the marked replies of `train.data` up to `train.steps`."""
    limit = run.policy.max_context

    def evaluate(learner: Learner, data: Sequence[Datum]) -> Logs:
        config, divergence = learner.config.kto, measure_divergence(learner, data, limit)
        gained, good = torch.tensor(gains(learner, data)), torch.tensor([_is_good(datum) for datum in data])
        rewards = {"kto/good": config.beta * gained[good], "kto/bad": config.beta * gained[~good]}
        means = {name: float(values.mean()) for name, values in rewards.items() if len(values)}
        return {"loss/kto": float(kto_losses(gained, good, divergence, config).mean()), **means}

    await learn_examples(run, config, method, render_replies, partial(prepare, limit=limit), evaluate)


def render_replies(replies: Sequence[MarkedReply], renderer: Renderer, max_context: int) -> list[Datum]:
    """Replies as token sequences, trained on the reply alone; those that do not fit the context are left out."""
    data = []
    for one in replies:
        datum = reply_datum(renderer.prompt_ids(one.prompt), renderer.render_reply(one.reply))
        datum.advantages = [1.0 if one.good else -1.0] * len(datum.ids)
        if not max_context or len(datum.ids) <= max_context:
            data.append(datum)
    return data


def prepare(learner: Learner, data: Sequence[Datum], limit: int = 0) -> Lesson:
    """What is learned from replies, with the reference's log-probabilities and the step's divergence computed.

    limit: longest context of the model; 0: none.
    """
    for datum, reference in zip(data, learner.logprobs(data, reference=True), strict=True):
        datum.reference = reference
    config, divergence = learner.config.kto, measure_divergence(learner, data, limit)
    return Lesson([[datum] for datum in data], partial(Kto, config, divergence), {"kto/kl": divergence})


def measure_divergence(learner: Learner, data: Sequence[Datum], limit: int) -> float:
    """The mean log ratio of policy to reference where each prompt has its neighbour's reply; at least 0."""
    swapped = []
    for asked, other in zip(data, [*data[-1:], *data[:-1]], strict=True):
        prompt, reply = asked.ids[: _start(asked)], other.ids[_start(other) :]
        swapped.append(reply_datum(prompt, reply[: max(limit - len(prompt), 1)] if limit else reply))
    gained = gains(learner, swapped)
    return max(sum(gained) / len(gained), 0.0)


def _is_good(datum: Datum) -> bool:
    return datum.advantages[0] > 0


def _start(datum: Datum) -> int:
    """Where the reply begins."""
    return datum.mask.index(1)
