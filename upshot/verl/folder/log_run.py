"""The run folder while verl runs: what is told of it from its beginning to its end, however that comes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from upshot.config.recipe import Recipe
from upshot.core.errors import reason_of
from upshot.models.local import load_tokenizer
from upshot.models.rendering import Renderer
from upshot.run.folder import RunFolder
from upshot.run.report.report import write_report
from upshot.run.reporter import Reporter
from upshot.tasks.base import tasks
from upshot.verl.checkpoints import make_whole, newest_step
from upshot.verl.folder.run_writer import VerlRunWriter
from upshot.verl.metrics import Follower
from upshot.verl.plan import VerlPlan
from upshot.verl.table import PROJECT


@contextmanager
def log_run(recipe: Recipe, folder: RunFolder, plan: VerlPlan, reporter: Reporter) -> Iterator[VerlRunWriter]:
    """Inside, verl runs. Afterwards its last lines are written, the newest checkpoint as a whole, status and report."""
    run_writer = open_run_writer(recipe, folder, reporter)
    run_writer.begin(int(plan.value("trainer.total_training_steps", 0)), newest_step(folder))
    try:
        with stop_on_sigterm():
            yield run_writer
        run_writer.follow()
        make_whole(folder)
        run_writer.writer.write_status("finished")
        write_report(folder.path)
    except BaseException as error:
        _stopped(run_writer, error)
        raise
    finally:
        run_writer.writer.close()


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM stops the run as Ctrl-C does, where this thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stopped(run_writer: VerlRunWriter, error: BaseException) -> None:
    """What can still be told of a run that ends with an error; what goes wrong with that is said beside it."""
    folder, say = run_writer.folder, run_writer.reporter.say

    def tell() -> None:
        run_writer.writer.write_status("stopped", reason=reason_of(error))
        if folder.begun:
            write_report(folder.path)

    for work in (run_writer.follow, lambda: make_whole(folder), tell):
        try:
            work()
        except Exception as second:
            say(f"at the end of the run: {reason_of(second)}")
    if newest_step(folder):
        say(f"go on with  upshot train --engine verl --resume {folder.path}")


def open_run_writer(recipe: Recipe, folder: RunFolder, reporter: Reporter) -> VerlRunWriter:
    """The writer of a recipe's run."""
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    renderer = Renderer(load_tokenizer(recipe.model.path), recipe.model.template_options)
    follower = Follower(folder.path / "verl" / PROJECT / f"{recipe.name}.jsonl")
    return VerlRunWriter(recipe, folder, follower, task, renderer.pieces, reporter)
