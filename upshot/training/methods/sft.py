"""Imitation of dialogues; its loop is `training/loops/sft.py`."""

from __future__ import annotations

from collections.abc import Sequence

from upshot.config.method import TrainingMethod, methods
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.conversation import Message
from upshot.tasks.base import Task
from upshot.tasks.datasets.records import read_dialogues


def has_reply(dialogue: Sequence[Message]) -> bool:
    """Whether the assistant says anything in a dialogue."""
    return any(message.role == "assistant" for message in dialogue)


def has_empty_reply(dialogue: Sequence[Message]) -> bool:
    """Whether a turn of the assistant in a dialogue has neither words nor tool calls."""
    return any(turn.role == "assistant" and not (turn.content.strip() or turn.tool_calls) for turn in dialogue)


@methods.register("sft")
class SFTMethod(TrainingMethod):
    """Imitation of whole dialogues."""

    imitates = dropout = True
    reads = ("data", "length_norm")
    best_metric = "eval/loss/nll"
    evaluates = ("loss/nll",)
    loop = "upshot.training.loops.sft"

    def examples(self, config: TrainConfig, task: Task) -> Sequence[tuple[Message, ...]]:
        """The dialogues of `train.data`, or the task's own."""
        return list(filter(has_reply, self._dialogues(config, task)))

    def _dialogues(self, config: TrainConfig, task: Task) -> Sequence[tuple[Message, ...]]:
        return read_dialogues(config.data) if config.data else task.dialogues("train")

    def held_out_examples(self, recipe: Recipe, task: Task) -> Sequence[tuple[Message, ...]]:
        """The dialogues of `eval.data`, or the task's own."""
        config = recipe.eval
        dialogues = read_dialogues(config.data, "eval.data") if config.data else task.dialogues(config.split)
        return list(filter(has_reply, dialogues))[: config.rows]

    def describe_data(self, config: TrainConfig, task: Task) -> list[str]:
        """How many dialogues are left out because the assistant has no turn in them, and in how many one is empty."""
        dialogues = self._dialogues(config, task)
        silent, empty = len(dialogues) - sum(map(has_reply, dialogues)), sum(map(has_empty_reply, dialogues))
        counts = {"no assistant turn and are left out": silent}
        counts["an empty assistant turn; the model learns to say nothing there"] = empty
        return [f"{count} of {len(dialogues)} dialogues have {what}" for what, count in counts.items() if count]

    def explain_empty(self, config: TrainConfig, task: Task) -> str:
        """See `TrainingMethod`."""
        if config.data:
            return f"train.data '{config.data}' has no dialogue with an assistant turn"
        return f"task '{task.name}' has no dialogues to imitate; set train.data=FILE"
