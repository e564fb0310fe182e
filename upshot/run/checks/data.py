"""What there is to learn from: files, columns, rows of every split that the run uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from upshot.config.method import method_of
from upshot.config.phases import WARM_START, phases_of
from upshot.core.conversation import Row
from upshot.run.checks.context import CheckContext, Finding
from upshot.run.checks.profiles import MOST_ROWS, code_verifier
from upshot.run.forecast import count_examples
from upshot.sandbox.local.languages import find_obstacle
from upshot.tasks.base import Task
from upshot.tasks.verified import VerifiedTask
from upshot.tasks.verifiers.code import language_of


def check(context: CheckContext) -> Iterator[Finding]:
    """Read the rows as the run would; what is wrong with a file is the reader's `UserError`."""
    recipe, task = context.recipe, context.task
    if WARM_START in phases_of(recipe) and not task.dialogues("train"):
        yield Finding(f"warm_start: task '{task.name}' has no dialogues to imitate; leave warm_start out")
    method, evaluated, every = method_of(recipe.train.method), recipe.eval, recipe.eval.every
    if not count_examples(recipe, task):
        yield Finding(method.explain_empty(recipe.train, task))
    yield from (Finding(says, fatal=False) for says in method.describe_data(recipe.train, task))
    held_out = method.held_out_examples(recipe, task) if every else None
    if held_out is not None and not held_out:
        yield Finding(method.explain_empty_evaluation(recipe))
    for key, path in (("train.data", recipe.train.data), ("eval.data", evaluated.data)):
        if path is not None and not Path(path).is_file():
            yield Finding(f"{key}: there is no file '{path}'; name one that exists, or leave it out")
    if context.sampled and any(metric.name == "verifier" for metric in recipe.reward.metrics):
        parts = dict.fromkeys(map(task.part, task.rows("train")))
        yield from (Finding(part.unanswered) for part in parts if isinstance(part, VerifiedTask) and part.unanswered)
    if every and context.sampled and not task.rows(evaluated.split):
        yield Finding(f"eval.every is {every}, but task '{task.name}' has no rows in split '{evaluated.split}'")
    here = context.sampled and recipe.sandbox.partition(":")[0] == "local"
    if here and (sentence := describe_languages(task.rows("train"), task)):
        yield Finding(sentence, fatal=False)


def describe_languages(rows: Sequence[Row], task: Task) -> str:
    """How many of the rows want their program in a language that this machine does not run; empty where none does."""
    programs = [row for row in rows[:MOST_ROWS] if code_verifier(row, task)]
    wanted = Counter(language_of(row.reference, row.meta) for row in programs)
    obstacles = {language: find_obstacle(language) for language in wanted}
    lost = sum(count for language, count in wanted.items() if obstacles[language])
    why = next(filter(None, obstacles.values()), "")
    return f"{lost} of {len(rows[:MOST_ROWS])} rows: {why}; their scores are missing" if lost else ""
