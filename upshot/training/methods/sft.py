"""Imitation of dialogues; its loop is `training/loops/sft.py`."""

from __future__ import annotations

from collections.abc import Sequence

from upshot.config.method import TrainingMethod, methods
from upshot.config.recipe import TrainConfig
from upshot.core.conversation import Message
from upshot.tasks.base import Task
from upshot.tasks.datasets.records import read_dialogues


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
        return read_dialogues(config.data) if config.data else task.dialogues("train")

    def explain_empty(self, config: TrainConfig, task: Task) -> str:
        """See `TrainingMethod`."""
        if config.data:
            return f"train.data '{config.data}' has no dialogues"
        return f"task '{task.name}' has no dialogues to imitate; set train.data=FILE"
