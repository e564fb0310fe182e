"""Supervised training: imitate whole dialogues, turn by turn as a rollout would render them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from upshot.config.method import TrainingMethod
from upshot.config.recipe import TrainConfig
from upshot.core.conversation import Message, Tools
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer
from upshot.tasks.datasets.records import read_dialogues
from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.evaluate import sum_trained
from upshot.training.loops.phase import Lesson, learn_examples
from upshot.training.objectives.objectives import Objective, normalise


class Dialogues(Sequence[Datum]):
    """Dialogues as token sequences, each rendered when it is first used: the first step does not wait for all.

    Those longer than the model's context are cut at its end; those in which the assistant says nothing are left out.
    """

    def __init__(
        self, dialogues: Iterable[Sequence[Message]], renderer: Renderer, max_context: int, tools: Tools = ()
    ) -> None:
        self._dialogues = [tuple(talk) for talk in dialogues if any(message.role == "assistant" for message in talk)]

        @cache
        def render(index: int) -> Datum:
            ids, mask = renderer.demonstration(self._dialogues[index], tools)
            return Datum(ids[: max_context or None], mask[: max_context or None])

        self._render = render

    def __len__(self) -> int:
        return len(self._dialogues)

    def __getitem__(self, index: Any) -> Any:
        return self._render(index)


async def train(run: LoopRun, config: TrainConfig, method: TrainingMethod) -> None:
    """Imitate the dialogues of `train.data`, or the task's own, up to `train.steps`."""
    policy, tools = run.policy, run.task.tools()
    dialogues = method.examples(config, run.task)
    if not dialogues:
        raise UserError(method.explain_empty(config, run.task))
    data = Dialogues(dialogues, policy.renderer, policy.max_context, tools)
    if not data:
        raise UserError("no dialogue has an assistant turn to imitate")

    def evaluate(learner: Learner) -> Logs:
        config, task = run.recipe.eval, run.task
        held_out = read_dialogues(config.data, "eval.data") if config.data else task.dialogues(config.split)
        if not held_out:
            raise UserError(f"task '{task.name}' has no dialogues in its split '{config.split}'; set eval.data=FILE")
        return sft_loss(learner, list(Dialogues(held_out[: config.rows], policy.renderer, policy.max_context, tools)))

    def prepare(_: Learner, picked: Sequence[Datum]) -> Lesson:
        units = [[datum] for datum in picked if any(datum.mask)]
        if not units:
            raise UserError("no assistant turn to imitate is left within the context; raise model.max_context")
        return Lesson(units, Sft)

    await learn_examples(run, config, data, prepare, evaluate)


def sft_loss(learner: Learner, data: Sequence[Datum]) -> Logs:
    """Mean negative log-likelihood of the assistant's tokens."""
    spoken = [datum for datum in data if any(datum.mask)]
    tokens = sum(sum(datum.mask) for datum in spoken)
    total = math.fsum(sum_trained(row, datum) for row, datum in zip(learner.logprobs(spoken), spoken, strict=True))
    return {"loss/nll": -total / max(tokens, 1)}


class Sft(Objective):
    """Cross-entropy on the masked tokens."""

    dropout = True

    def loss(self, batch: TrainBatch, output: ForwardOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean negative log-likelihood."""
        loss = normalise(-output.logprobs, batch, self.by)
        return loss, {"loss/nll": loss.detach()}
