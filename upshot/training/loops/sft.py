"""Supervised training: imitate whole dialogues, turn by turn as a rollout would render them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor

from upshot.config.method import TrainingMethod
from upshot.config.recipe import TrainConfig
from upshot.core.conversation import Message, Row, Tools
from upshot.models.rendering import Renderer
from upshot.rollout.prompt_length import PromptLengthFilter
from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.evaluate import sum_trained
from upshot.training.loops.phase import Lesson, learn_examples
from upshot.training.methods.sft import has_reply
from upshot.training.objectives.objectives import Objective, normalise


class Dialogues(Sequence[Datum]):
    """Dialogues as token sequences, each rendered when it is first used: the first step does not wait for all.

    Those longer than the model's context are cut at its end; those in which the assistant says nothing before that are
    left out.
    """

    def __init__(
        self, dialogues: Iterable[Sequence[Message]], renderer: Renderer, max_context: int, tools: Tools = ()
    ) -> None:
        talks = [tuple(talk) for talk in dialogues if has_reply(talk)]
        lengths = PromptLengthFilter(renderer, max_context, 0, tools=tools)

        @cache
        def render(index: int) -> Datum:
            ids, mask = renderer.demonstration(talks[index], tools)
            return Datum(ids[: max_context or None], mask[: max_context or None])

        self._render = render
        self._kept = [at for at, talk in enumerate(talks) if lengths.fits(Row("", talk)) or any(render(at).mask)]

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: Any) -> Any:
        return self._render(self._kept[index])


async def train(run: LoopRun, config: TrainConfig, method: TrainingMethod) -> None:
    """Imitate the dialogues of `train.data`, or the task's own, up to `train.steps`."""
    await learn_examples(run, config, method, partial(Dialogues, tools=run.task.tools()), prepare, sft_loss)


def prepare(_: Learner, picked: Sequence[Datum]) -> Lesson:
    """What is learned from dialogues."""
    return Lesson([[datum] for datum in picked if any(datum.mask)], Sft)


def sft_loss(learner: Learner, data: Sequence[Datum]) -> Logs:
    """Mean negative log-likelihood of the assistant's tokens."""
    total = math.fsum(sum_trained(row, datum) for row, datum in zip(learner.logprobs(data), data, strict=True))
    return {"loss/nll": -total / sum(sum(datum.mask) for datum in data)}


class Sft(Objective):
    """Cross-entropy on the masked tokens."""

    dropout = True

    def loss(self, batch: TrainBatch, output: ForwardOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean negative log-likelihood."""
        loss = normalise(-output.logprobs, batch, self.by)
        return loss, {"loss/nll": loss.detach()}
