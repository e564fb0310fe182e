"""Single replies marked good or bad; its loop is `training/loops/kto.py`."""

from __future__ import annotations

from upshot.config.method import TrainingMethod, methods
from upshot.config.recipe import Recipe, TrainConfig
from upshot.core.errors import UserError
from upshot.tasks.base import Task
from upshot.tasks.datasets.records import MarkedReply, read_marked_replies


@methods.register("kto")
class KTOMethod(TrainingMethod):
    """Single replies marked good or bad."""

    reference = True
    reads = ("data", "kto")
    best_metric = "eval/loss/kto"
    evaluates = ("loss/kto", "kto/good", "kto/bad")
    held_out = "replies"
    loop = "upshot.training.loops.kto"

    def examples(self, config: TrainConfig, task: Task) -> list[MarkedReply]:
        """The replies of `train.data`."""
        if not config.data:
            raise UserError(
                "train.method 'kto' needs train.data: rows with prompt, completion and label (true or false)"
            )
        return read_marked_replies(config.data)

    def held_out_examples(self, recipe: Recipe, task: Task) -> list[MarkedReply]:
        """The replies of `eval.data`."""
        return read_marked_replies(str(recipe.eval.data), "eval.data")[: recipe.eval.rows]

    def describe_data(self, config: TrainConfig, task: Task) -> list[str]:
        """Whether all replies are marked alike."""
        marks = {reply.good for reply in self.examples(config, task)}
        word = "good (label true)" if True in marks else "bad (label false)"
        return [f"all replies are marked {word}; kto learns from the contrast of both"] if len(marks) == 1 else []

    def check(self, recipe: Recipe) -> None:
        """Refuse a step of one reply, which has no neighbour, and evaluation without held-out replies."""
        if recipe.train.prompts_per_step < 2:
            raise UserError("train.method 'kto' swaps the replies of a step; set train.prompts_per_step to 2 or more")
        super().check(recipe)

    def explain_empty(self, config: TrainConfig, task: Task) -> str:
        """See `TrainingMethod`."""
        return f"train.data '{config.data}': no reply fits the context (model.max_context)"
