"""Starts verl on a prepared recipe: its own program in its own process group, with its log in the run folder."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from upshot.config.phases import phases_of
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError, reason_of
from upshot.run.checks import refuse
from upshot.run.console import Reporter
from upshot.run.folder import RunFolder
from upshot.run.report.report import write_report
from upshot.serving.servers.state import lease
from upshot.verl.checkpoints import begin_folder, make_whole, newest_step, skip_first_validation
from upshot.verl.checks import find
from upshot.verl.config import compose
from upshot.verl.plan import MAIN, RECIPE, WORKERS, VerlPlan
from upshot.verl.prepare import make_start, prepare
from upshot.verl.process import GRACE_S, LOG, reason_in, run, stop_on_sigterm
from upshot.verl.recorder import RunEcho
from upshot.verl.table import WAITS

TIDY = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout")
"""Keeps hydra from writing a folder and a log into the current folder."""


def launch(
    recipe: Recipe,
    theirs: Sequence[str],
    say: Callable[[str], None] = print,
    reporter: Reporter | None = None,
    resumed: RunFolder | None = None,
) -> Path:
    """Write the run folder, run verl to its end, return the folder; a failed run is a `UserError` with its log's end.

    verl's own lines go to its log and to `say`; the reporter receives the same events as in local mode.
    `resumed`: the folder of a run to resume.
    """
    if importlib.util.find_spec("verl") is None:
        raise UserError("--engine verl needs verl: pip install -e '.[verl]'")
    wanted = compose(recipe, None, theirs)
    wanted.check()
    refuse(find(recipe, wanted, resumed=resumed is not None))
    folder = resumed or RunFolder.create(recipe)
    reporter = reporter or Reporter()
    try:
        with folder.lock(reporter.say), lease(recipe.serve, reporter.say):
            warm = make_start(recipe, folder.path, reporter.say, resumed is not None)
            plan = skip_first_validation(compose(warm, prepare(warm, folder.path), theirs), folder)
            plan.check()
            for note in plan.notes():
                reporter.say(note)
            begin_folder(folder, recipe, plan, theirs)
            with conclude(recipe, folder, plan, reporter) as echo:
                if newest_step(folder) < plan.value("trainer.total_training_steps"):  # else a finished run was resumed
                    _run(plan, environment(recipe, folder.path), folder, echo, say)
    finally:
        reporter.close()
    return folder.path


@contextmanager
def conclude(recipe: Recipe, folder: RunFolder, plan: VerlPlan, reporter: Reporter) -> Iterator[RunEcho]:
    """Inside, verl runs. Afterwards, in any case, write the newest checkpoint as one folder, status and report."""
    phase, done = recipe.train.method, newest_step(folder)
    folder.rewind(phases_of(recipe), phase, done or -1)
    reporter.phase(phase, int(plan.value("trainer.total_training_steps", 0)), done)
    echo = RunEcho(folder, phase, reporter)
    _write_state(folder, "running")
    try:
        with stop_on_sigterm():
            yield echo
        echo.follow()
        make_whole(folder)
        _write_state(folder, "finished")
        write_report(folder.path)
    except BaseException as error:
        _tell_stopped(folder, echo, error)
        raise


STATUS = ("phase", "step", "steps", "alarms", "metrics")
"""The fields of status.json, written by the trainer, that stay after the run has ended."""


def _write_state(folder: RunFolder, state: str, **more: str) -> None:
    folder.write_status(state, **{key: value for key, value in folder.status.items() if key in STATUS}, **more)


def _tell_stopped(folder: RunFolder, echo: RunEcho, error: BaseException) -> None:
    """Record what is known about a run that failed; further errors are reported in addition."""

    def tell() -> None:
        _write_state(folder, "stopped", reason=reason_of(error))
        if folder.begun:
            write_report(folder.path)

    for work in (echo.follow, lambda: make_whole(folder), tell):
        try:
            work()
        except Exception as second:
            echo.reporter.say(f"at the end of the run: {reason_of(second)}")
    if newest_step(folder):
        echo.reporter.say(f"resume with  upshot train --engine verl --resume {folder.path}")


def _run(plan: VerlPlan, env: dict[str, str], folder: RunFolder, echo: RunEcho, say: Callable[[str], None]) -> None:
    log = folder.path / LOG

    def hear(line: str) -> None:
        echo.follow(line)
        say(line)

    code = run(command(plan), env, log, hear, float(plan.value("upshot.watch.grace_s", GRACE_S)))
    if code:
        if why := reason_in(log):
            raise UserError(why)
        tail = log.read_text(errors="replace").splitlines()[-3:]
        raise UserError(f"verl ended with {code}; {log} ends: {' | '.join(tail)}")


def command(plan: VerlPlan) -> list[str]:
    """The command line of verl's program."""
    return [sys.executable, "-m", MAIN, *plan.overrides(), *TIDY]


def environment(recipe: Recipe, folder: Path) -> dict[str, str]:
    """The environment of verl's processes on this machine; Ray sets that of the others (`runtime_env`)."""
    paths = [*recipe.code, *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {RECIPE: str(folder.resolve() / WORKERS)}
    return {**WAITS, **os.environ, **variables, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}
