"""What there is to learn from: files, columns, rows of every split that the run uses."""

from __future__ import annotations

from collections.abc import Iterator

from upshot.config.phases import WARM_START, phases_of
from upshot.config.recipe import Recipe
from upshot.run.checks.bench import CheckContext, Finding
from upshot.run.plan import count_examples
from upshot.tasks.base import Task


def check(bench: CheckContext) -> Iterator[Finding]:
    """Read the rows as the run would; what is wrong with a file is the reader's `UserError`."""
    recipe, task = bench.recipe, bench.task
    if WARM_START in phases_of(recipe) and not task.dialogues("train"):
        yield Finding(f"warm_start: task '{task.name}' has no dialogues to imitate; leave warm_start out")
    if not count_examples(recipe, task):
        yield Finding(_nothing(recipe, task))
    split = recipe.eval.split
    if recipe.eval.every and bench.sampled and not task.rows(split):
        yield Finding(f"eval.every is {recipe.eval.every}, but task '{task.name}' has no rows in split '{split}'")


def _nothing(recipe: Recipe, task: Task) -> str:
    """What is said when there is nothing to learn from."""
    config = recipe.train
    if config.method == "dpo":
        return f"train.data '{config.data}': no pair is left to learn from (train.dpo.min_gap={config.dpo.min_gap:g})"
    if config.method == "sft" and config.data:
        return f"train.data '{config.data}' has no dialogues"
    return f"task '{task.name}' has nothing to train on in its split 'train'; look at the options under `task`"
