"""Offline preference training: pairs of replies from a file, the better one against the worse one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from upshot.config.method import TrainingMethod
from upshot.config.recipe import TrainConfig
from upshot.models.rendering import Renderer
from upshot.tasks.datasets.records import Preference
from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.evaluate import gains
from upshot.training.loops.phase import Lesson, learn_examples
from upshot.training.objectives.objectives import Objective


async def train(run: LoopRun, config: TrainConfig, method: TrainingMethod) -> None:
    """Learn the pairs of `train.data` up to `train.steps`."""
    await learn_examples(run, config, method, render_pairs, prepare, dpo_loss)


def prepare(learner: Learner, pairs: Sequence[tuple[Datum, Datum]]) -> Lesson:
    """What is learned from pairs (chosen, rejected), with the reference's log-probabilities computed for them."""
    data = list(chain.from_iterable(pairs))
    for datum, reference in zip(data, learner.logprobs(data, reference=True) if data else (), strict=True):
        datum.reference = reference
    return Lesson(pairs, partial(Dpo, learner.config), {"train/pairs": float(len(pairs))})


def render_pairs(preferences: Sequence[Preference], renderer: Renderer, max_context: int) -> list[tuple[Datum, Datum]]:
    """Pairs as token sequences, trained on the replies only; a pair that does not fit the context is left out."""
    pairs = []
    for preference in preferences:
        prompt = renderer.prompt_ids(preference.prompt)
        texts = (preference.chosen, preference.rejected)
        chosen, rejected = (reply_datum(prompt, renderer.render_reply(text)) for text in texts)
        if not max_context or max(len(chosen.ids), len(rejected.ids)) <= max_context:
            pairs.append((chosen, rejected))
    return pairs


def reply_datum(prompt: list[int], reply: list[int]) -> Datum:
    """A prompt and a reply as one sequence, trained on the reply."""
    return Datum([*prompt, *reply], [*[0] * len(prompt), *[1] * len(reply)])


def preference(margin_P: Tensor, beta: float, kind: str) -> Tensor:
    """Loss per pair from how much more the chosen reply gained on the reference than the rejected one.

    sigmoid (DPO): margins of summed log-probabilities. ipo: margins of their means over a reply's tokens, drawn towards
    1 / (2 beta) instead of without end.
    """
    if kind == "sigmoid":
        return -F.logsigmoid(beta * margin_P)
    if kind == "ipo":
        return (margin_P - 1 / (2 * beta)).square()
    raise ValueError(f"unknown preference loss '{kind}'")


class Dpo(Objective):
    """Direct preference optimisation over pairs: chosen and rejected stand next to each other in the batch."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def weight(self, name: str) -> float:
        """All that is logged are means over pairs."""
        return max(self.by.sequences // 2, 1)

    def loss(self, batch: TrainBatch, output: ForwardOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over pairs of the preference loss."""
        policy, reference = batch.sums(output.logprobs), batch.sums(batch.columns["reference"])
        gained = policy - reference
        if self.config.dpo.loss == "ipo":
            gained = gained / batch.counts().clamp(min=1)
        margin = gained[::2] - gained[1::2]
        pairs = max(self.by.sequences // 2, 1)
        loss = preference(margin, self.config.dpo.beta, self.config.dpo.loss).sum() / pairs
        return loss, {
            "loss/dpo": loss.detach(),
            "dpo/accuracy": (margin.detach() > 0).float().sum() / pairs,
            "dpo/margin": self.config.dpo.beta * margin.detach().sum() / pairs,
        }


def dpo_loss(learner: Learner, pairs: Sequence[tuple[Datum, Datum]]) -> Logs:
    """Mean over pairs of the recipe's preference loss, the margin, and how often the better reply is ahead."""
    config, data = learner.config, list(chain.from_iterable(pairs))
    gained = gains(learner, data)
    if config.dpo.loss == "ipo":
        gained = [gain / max(sum(datum.mask), 1) for gain, datum in zip(gained, data, strict=True)]
    margin = torch.tensor(gained[::2]) - torch.tensor(gained[1::2])
    return {
        "loss/dpo": float(preference(margin, config.dpo.beta, config.dpo.loss).mean()),
        "dpo/margin": float(config.dpo.beta * margin.mean()),
        "dpo/accuracy": float((margin > 0).float().mean()),
    }
