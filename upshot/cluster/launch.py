"""Start verl on a prepared recipe: its own program in its own process group, its words in the run folder."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from upshot.cluster import on_cpu
from upshot.cluster.checks import find, refuse
from upshot.cluster.config import RECIPE, Plan, compose
from upshot.cluster.metrics import Follower
from upshot.cluster.prepare import prepare
from upshot.cluster.process import reason_in, run
from upshot.cluster.start import started
from upshot.cluster.table import PROJECT
from upshot.errors import UserError
from upshot.recipe import Recipe
from upshot.train.folder import METRICS, RunFolder

LOG = "verl.log"
MAIN = "upshot.cluster.adapters.main"


def launch(recipe: Recipe, theirs: Sequence[str], say: Callable[[str], None] = print, local: bool = False) -> Path:
    """Write the run folder, run verl to its end; the folder. A failed run is a `UserError` with the end of its log."""
    if importlib.util.find_spec("verl") is None:
        raise UserError("--engine verl needs verl: pip install 'upshot[verl]'")
    wanted = compose(recipe, None, theirs, local)
    wanted.check()
    refuse(find(recipe, wanted, env=on_cpu.ENVIRONMENT if local else None))
    folder = RunFolder.create(recipe)
    recipe = started(recipe, folder.path, say)
    plan = compose(recipe, prepare(recipe, folder.path), theirs, local)
    plan.check()
    (folder.path / "verl.txt").write_text(plan.page() + "\n")
    follower = Follower(folder.path / "verl" / PROJECT / f"{recipe.name}.jsonl", folder.path / METRICS)

    def told(line: str) -> None:
        follower.follow()
        say(line)

    try:
        code = run(command(plan), environment(recipe, folder.path, local), folder.path / LOG, told)
    finally:
        follower.follow()
    if code:
        if why := reason_in(folder.path / LOG):
            raise UserError(why)
        tail = (folder.path / LOG).read_text(errors="replace").splitlines()[-3:]
        raise UserError(f"verl ended with {code}; {folder.path / LOG} ends: {' | '.join(tail)}")
    return folder.path


def command(plan: Plan) -> list[str]:
    """verl's program with its words."""
    return [sys.executable, "-m", MAIN, *plan.overrides()]


def environment(recipe: Recipe, folder: Path, local: bool = False) -> dict[str, str]:
    """What verl's processes on this machine are told; Ray tells the others (`runtime_env`)."""
    paths = [*recipe.code, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {RECIPE: str(folder.resolve() / "recipe.yaml"), "VERL_FILE_LOGGER_ROOT": str(folder.resolve() / "verl")}
    usual = on_cpu.ENVIRONMENT if local else {}
    return {**usual, **os.environ, **own, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}
