"""Start verl on a prepared recipe: its own program in its own process group, its words in the run folder."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.run.folder import RunFolder
from upshot.run.reporter import Reporter
from upshot.verl import on_cpu
from upshot.verl.checkpoints import newest_step
from upshot.verl.checks import find, refuse
from upshot.verl.config import compose
from upshot.verl.folder.log_run import log_run
from upshot.verl.folder.run_writer import VerlRunWriter
from upshot.verl.plan import RECIPE, VerlPlan
from upshot.verl.prepare import prepare
from upshot.verl.process import reason_in, run
from upshot.verl.resume import LOCAL, begin_folder, skip_first_validation
from upshot.verl.start import make_start

LOG = "verl.log"
TIDY = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout")
"""hydra leaves no folder and no log of its own where the command was typed."""


def launch(
    recipe: Recipe,
    theirs: Sequence[str],
    say: Callable[[str], None] = print,
    local: bool = False,
    reporter: Reporter | None = None,
    resumed: RunFolder | None = None,
) -> Path:
    """Write the run folder, run verl to its end; the folder. A failed run is a `UserError` with the end of its log.

    verl's own lines go to its log and to `say`; the reporter is told what it would be told of a run in local mode.
    `resumed`: the folder of a run to go on with.
    """
    if importlib.util.find_spec("verl") is None:
        raise UserError("--engine verl needs verl: pip install -e '.[verl]'")
    wanted = compose(recipe, None, theirs, local)
    wanted.check()
    refuse(find(recipe, wanted, resumed=resumed is not None, env=on_cpu.ENVIRONMENT if local else None))
    folder = resumed or RunFolder.create(recipe)
    reporter = reporter or Reporter()
    try:
        with folder.lock(reporter.say):
            warm = make_start(recipe, folder.path, reporter.say, resumed is not None)
            plan = skip_first_validation(compose(warm, prepare(warm, folder.path), theirs, local), folder)
            plan.check()
            begin_folder(folder, recipe, plan, [*theirs, *([LOCAL] if local else [])])
            with log_run(warm, folder, plan, reporter) as writer:
                if newest_step(folder) < plan.value("trainer.total_training_steps"):  # else a finished run was resumed
                    _run(plan, environment(recipe, folder.path, local), writer, say)
    finally:
        reporter.close()
    return folder.path


def _run(plan: VerlPlan, env: dict[str, str], writer: VerlRunWriter, say: Callable[[str], None]) -> None:
    log = writer.folder.path / LOG

    def told(line: str) -> None:
        writer.follow()
        say(line)

    code = run(command(plan), env, log, told)
    if code:
        if why := reason_in(log):
            raise UserError(why)
        tail = log.read_text(errors="replace").splitlines()[-3:]
        raise UserError(f"verl ended with {code}; {log} ends: {' | '.join(tail)}")


def command(plan: VerlPlan) -> list[str]:
    """verl's program with its words."""
    return [sys.executable, "-m", *plan.program, *plan.overrides(), *TIDY]


def environment(recipe: Recipe, folder: Path, local: bool = False) -> dict[str, str]:
    """What verl's processes on this machine are told; Ray tells the others (`runtime_env`)."""
    paths = [*recipe.code, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {RECIPE: str(folder.resolve() / "recipe.yaml"), "VERL_FILE_LOGGER_ROOT": str(folder.resolve() / "verl")}
    usual = on_cpu.ENVIRONMENT if local else {}
    return {**usual, **os.environ, **own, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}
