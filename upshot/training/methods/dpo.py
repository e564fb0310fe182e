"""Pairs of replies from a file; its loop is `training/loops/dpo.py`."""

from __future__ import annotations

from upshot.config.method import TrainingMethod, methods
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.tasks.base import Task
from upshot.tasks.datasets.records import Preference, read_preferences


@methods.register("dpo")
class DPOMethod(TrainingMethod):
    """Pairs of replies from a file."""

    pairs = reference = True
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

    def held_out_examples(self, recipe: Recipe, task: Task) -> list[Preference]:
        """The pairs of `eval.data`."""
        return read_preferences(str(recipe.eval.data), recipe.train.dpo.min_gap, "eval.data")[: recipe.eval.rows]

    def describe_data(self, config: TrainConfig, task: Task) -> list[str]:
        """How many pairs are of the same reply twice, and how many have a pair of the opposite order."""
        pairs = [(str(pair.prompt), pair.chosen, pair.rejected) for pair in self.examples(config, task)]
        same, known = sum(chosen == rejected for _, chosen, rejected in pairs), set(pairs)
        if same == len(pairs) > 0:
            raise UserError(f"train.data '{config.data}': chosen and rejected are the same in all {same} pairs")
        opposed = sum((prompt, rejected, chosen) in known for prompt, chosen, rejected in pairs) - same
        notes = [(same, "have the same reply as chosen and rejected: nothing is learned from them")]
        notes += [(opposed, "contradict another pair, which prefers the other reply")]
        return [f"{count} of {len(pairs)} pairs {what}" for count, what in notes if count]

    def explain_empty(self, config: TrainConfig, task: Task) -> str:
        """See `TrainingMethod`."""
        return (
            f"train.data '{config.data}': no pair is left to learn from; all have a gap below train.dpo.min_gap "
            f"({config.dpo.min_gap:g}) or are longer than model.max_context"
        )
