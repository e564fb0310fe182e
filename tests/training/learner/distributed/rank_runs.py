"""Two ranks on the CPU that run recipes one after another; `two_ranks` starts them as a separate process.

That process has imported everything and becomes both ranks by forking, before torch has computed anything.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import peft  # noqa: F401  so that it is imported once
import pytest

from tests.support.forked import Forked
from upshot.config.load import dump_recipe, load_recipe
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.run.console import Reporter
from upshot.run.folder import RunFolder
from upshot.run.run import train
from upshot.training.learner.distributed.process_group import open_ranks

ROOT = Path(__file__).parents[4]
Job = tuple[Recipe, str]


def two_ranks(jobs: Sequence[Job], folder: Path) -> None:
    """Run recipes on two ranks. A job's word says how it begins, or ends.

    'new', 'resume', 'NAME STEP': from that step of the run in the folder NAME beside it; 'fails': with a `UserError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = []
    for number, (recipe, word) in enumerate(jobs):
        file = folder / f"{number}.yaml"
        file.write_text(dump_recipe(recipe))
        words.append([str(file), word])
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with Forked(
        "tests.training.learner.distributed.rank_runs", json.dumps(words), env=os.environ | more, cwd=ROOT
    ) as done:
        text, _ = done.communicate()
        assert done.wait() == 0, text


def both(words: Sequence[tuple[str, str]]) -> int:
    """Become two ranks; returns the first nonzero exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for rank in range(2):
        if not os.fork():
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            _run_and_leave(words)
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)]  # whichever ends first is gone then
    return next((code for code in codes if code), 0)


def _run_and_leave(words: Sequence[tuple[str, str]]) -> NoReturn:
    """Exit without tearing down the interpreter, which takes longer than the runs."""
    code = 1
    try:
        run(words)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(words: Sequence[tuple[str, str]]) -> None:
    """Run the jobs as the rank that the environment names."""
    ranks = open_ranks("cpu")
    for file, word in words:
        recipe = load_recipe(file).recipe
        folder = begin(recipe, word) if ranks.first else RunFolder(Path(str(recipe.run_dir)), read_only=True)
        ranks.barrier("begin")
        with pytest.raises((UserError, BaseExceptionGroup)) if word == "fails" else nullcontext():
            train(recipe, folder, Reporter(), ranks)
    ranks.leave()


def begin(recipe: Recipe, word: str) -> RunFolder:
    """The folder of a run as its job says."""
    if word in ("new", "fails"):
        return RunFolder.create(recipe)
    path = Path(str(recipe.run_dir))
    if word == "resume":
        return RunFolder.open(path)
    name, step = word.split()
    shutil.copytree(path.parent / name, path)
    folder = RunFolder.open(path)
    for saved in folder.checkpoints.saved():
        if saved.step > int(step):
            shutil.rmtree(saved.path)
    return folder


if __name__ == "__main__":
    sys.exit(both(json.loads(sys.argv[1])))
