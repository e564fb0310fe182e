"""Supervised training: imitate whole dialogues, turn by turn as a rollout would render them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from upshot.config.method import TrainingMethod, methods
from upshot.config.recipe import TrainConfig
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.models.rendering import Renderer
from upshot.tasks.base import Task
from upshot.tasks.datasets.records import read_dialogues
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import Logs, LoopRun
from upshot.training.loops.evaluate import read_held_out_dialogues, sft_loss
from upshot.training.loops.minibatches import Lesson
from upshot.training.loops.phase import learn_examples
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
        if index not in self._rendered:
            ids, mask = self._renderer.demonstration(self._dialogues[index], self._tools)
            self._rendered[index] = Datum(ids[: self._limit], mask[: self._limit])
        return self._rendered[index]


@methods.register("sft")
class SFTMethod(TrainingMethod):
    """Imitation of whole dialogues."""

    imitates = dropout = True
    best_metric = "eval/loss/nll"
    evaluates = ("loss/nll",)

    async def train(self, run: LoopRun, config: TrainConfig) -> None:
        """Imitate the dialogues of `train.data`, or the task's own, up to `train.steps`."""
        policy, tools = run.policy, run.task.tools()
        dialogues = self.examples(config, run.task)
        if not dialogues:
            raise UserError(self.explain_empty(config, run.task))
        data = Dialogues(dialogues, policy.renderer, policy.max_context, tools)
        if not data:
            raise UserError("no dialogue has an assistant turn to imitate")

        def evaluate(learner: Learner) -> Logs:
            held_out = read_held_out_dialogues(run.recipe, run.task)
            return sft_loss(learner, list(Dialogues(held_out, policy.renderer, policy.max_context, tools)))

        def prepare(_: Learner, picked: Sequence[int]) -> Lesson:
            units = [[data[i]] for i in picked if any(data[i].mask)]
            if not units:
                raise UserError("no assistant turn to imitate is left within the context; raise model.max_context")
            return Lesson(units, Sft)

        await learn_examples(run, config, len(data), prepare, evaluate)

    def examples(self, config: TrainConfig, task: Task) -> Sequence[tuple[Message, ...]]:
        """The dialogues of `train.data`, or the task's own."""
        return read_dialogues(config.data) if config.data else task.dialogues("train")

    def explain_empty(self, config: TrainConfig, task: Task) -> str:
        """See `TrainingMethod`."""
        if config.data:
            return f"train.data '{config.data}' has no dialogues"
        return f"task '{task.name}' has no dialogues to imitate; set train.data=FILE"
