"""The run folder while verl runs: what is told of it from its beginning to its end, however that comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from upshot.cluster.checkpoints import make_whole, newest
from upshot.cluster.chronicle import Chronicle
from upshot.cluster.config import Plan
from upshot.cluster.metrics import Follower
from upshot.cluster.table import PROJECT
from upshot.errors import reason_of
from upshot.models.local import load_tokenizer
from upshot.models.rendering import Renderer
from upshot.recipe import Recipe
from upshot.tasks.base import tasks
from upshot.train.folder import RunFolder
from upshot.train.reporter import Reporter


@contextmanager
def telling(recipe: Recipe, folder: RunFolder, plan: Plan, reporter: Reporter) -> Iterator[Chronicle]:
    """Inside, verl runs. Afterwards its last lines are written, the status, and its newest checkpoint as a whole."""
    chronicle = open_chronicle(recipe, folder, reporter)
    chronicle.begin(int(plan.value("trainer.total_training_steps", 0)), newest(folder))
    try:
        yield chronicle
        chronicle.follow()
        make_whole(folder)
        chronicle.writer.status("finished")
    except BaseException as error:
        _stopped(chronicle, error)
        raise
    finally:
        chronicle.writer.close()


def _stopped(chronicle: Chronicle, error: BaseException) -> None:
    """What can still be told of a run that ends with an error; what goes wrong with that is said beside it."""
    for work in (chronicle.follow, lambda: make_whole(chronicle.folder)):
        try:
            work()
        except Exception as second:
            chronicle.reporter.say(f"at the end of the run: {reason_of(second)}")
    chronicle.writer.status("stopped", reason=reason_of(error))


def open_chronicle(recipe: Recipe, folder: RunFolder, reporter: Reporter) -> Chronicle:
    """The chronicle of a recipe's run."""
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    renderer = Renderer(load_tokenizer(recipe.model.path), recipe.model.template_options)
    follower = Follower(folder.path / "verl" / PROJECT / f"{recipe.name}.jsonl")
    return Chronicle(recipe, folder, follower, task, renderer.spelled, reporter)
