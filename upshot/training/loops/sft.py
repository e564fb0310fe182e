"""Supervised training: imitate whole dialogues, turn by turn as a rollout would render them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from upshot.config.recipe import TrainConfig
from upshot.core.conversation import Message, derive_seed
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer
from upshot.tasks.datasets.records import read_dialogues
from upshot.training.learner.batch import Datum
from upshot.training.loops.base import LoopRun
from upshot.training.loops.evaluate import Evaluator
from upshot.training.loops.validation import held_out_dialogues, sft_loss
from upshot.training.objectives.objectives import Sft


class Dialogues(Sequence[Datum]):
    """Dialogues as token sequences, each rendered when it is first used: the first step does not wait for all.

    Those longer than the model's context are cut at its end; those in which the assistant says nothing are left out.
    """

    def __init__(
        self,
        dialogues: Sequence[tuple[Message, ...]],
        renderer: Renderer,
        max_context: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._dialogues = [talk for talk in dialogues if any(message.role == "assistant" for message in talk)]
        self._rendered: dict[int, Datum] = {}
        self._renderer = renderer
        self._limit = max_context or None
        self._tools = tools

    def __len__(self) -> int:
        return len(self._dialogues)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        if index not in self._rendered:
            ids, mask = self._renderer.demonstration(self._dialogues[index], self._tools)
            self._rendered[index] = Datum(ids[: self._limit], mask[: self._limit])
        return self._rendered[index]


def pick(size: int, count: int, step: int, seed: int) -> list[int]:
    """The items of a step: passes over the data in a new order each, position a function of the step alone."""
    chosen = []
    for place in range(step * count, (step + 1) * count):
        epoch, position = divmod(place, size)
        chosen.append(_order(size, derive_seed(seed, "epoch", epoch))[position])
    return chosen


_orders: dict[tuple[int, int], list[int]] = {}


def _order(size: int, seed: int) -> list[int]:
    if (size, seed) not in _orders:
        order = list(range(size))
        random.Random(seed).shuffle(order)
        if len(_orders) > 8:
            _orders.clear()
        _orders[size, seed] = order
    return _orders[size, seed]


async def train(run: LoopRun, config: TrainConfig) -> None:
    """Imitate the dialogues of `train.data`, or the task's own, up to `config.steps`."""
    dialogues = read_dialogues(config.data) if config.data else run.task.dialogues("train")
    if not dialogues:
        raise UserError(f"task '{run.task.name}' has no dialogues to imitate; set train.data=FILE")
    rendered = (run.renderer, run.loaded.max_context, run.task.tools())
    data = Dialogues(dialogues, *rendered)
    if not data:
        raise UserError("no dialogue has an assistant turn to imitate")
    config = run.lasting(config, len(data))
    looks = Evaluator(run)
    if looks.enough:
        return  # a finished run was resumed
    learner = run.learner(config)
    run.begin(learner, config)
    seed = derive_seed(run.recipe.seed, run.phase)

    async def look() -> dict[str, float]:
        return sft_loss(learner, list(Dialogues(held_out_dialogues(run.recipe, run.task), *rendered)))

    for step in range(run.step, config.steps):
        with run.meter.step() as times:
            evaluation = await looks.before(step, look)
            if looks.enough:
                looks.end(evaluation)
                break
            units = [[data[i]] for i in pick(len(data), config.prompts_per_step, step, seed) if any(data[i].mask)]
            if not units:
                raise UserError("no assistant turn to imitate is left within the context; raise model.max_context")
            with run.ranks.update(), times.learning(learner):
                logs = learner.forward_backward(units, Sft()) | learner.step()
        run.step_done(step + 1, logs | evaluation | times.logs)
        await asyncio.sleep(0)  # where Ctrl-C arrives: between steps, never inside one
    run.checkpoint()
    await looks.last(look)
