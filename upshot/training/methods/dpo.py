"""Pairs of replies from a file; its loop is `training/loops/dpo.py`."""

from __future__ import annotations

from upshot.config.method import TrainingMethod, methods
from upshot.config.recipe import TrainConfig
from upshot.core.errors import UserError
from upshot.tasks.base import Task
from upshot.tasks.datasets.records import Preference, read_preferences


@methods.register("dpo")
class DPOMethod(TrainingMethod):
    """Pairs of replies from a file."""

    pairs = True
    reads = ("data", "dpo")
    best_metric = "eval/loss/dpo"
    evaluates = ("loss/dpo", "dpo/margin", "dpo/accuracy")
    held_out = "pairs"
    loop = "upshot.training.loops.dpo"

    def examples(self, config: TrainConfig, task: Task) -> list[Preference]:
        """The pairs of `train.data` whose scores are far enough apart."""
        if not config.data:
            raise UserError("train.method 'dpo' needs train.data; make it with `upshot data prepare --for dpo`")
        return read_preferences(config.data, config.dpo.min_gap)

    def needs_reference(self, config: TrainConfig) -> bool:
        """Pairs are compared with it."""
        return True

    def explain_empty(self, config: TrainConfig, task: Task) -> str:
        """See `TrainingMethod`."""
        return (
            f"train.data '{config.data}': no pair is left to learn from; all have a gap below train.dpo.min_gap "
            f"({config.dpo.min_gap:g}) or are longer than model.max_context"
        )
