"""`torchrun … -m upshot train` as a user starts it, and how it ends; it takes a quarter of a minute to start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.patience import wait_until
from tests.support.forked import Forked
from tests.training.workshop import metrics
from tests.training.workshop import recipe_on_cpu as recipe
from upshot.cli import main
from upshot.config.load import dump_recipe
from upshot.run.folder import RunFolder
from upshot.run.run import train

ROOT = Path(__file__).parents[4]


def reward(name: str) -> dict[str, Any]:
    return {"reward": {"metrics": [{"name": f"tests.training.helpers:{name}"}]}}


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@contextmanager
def torchrun(*words: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """The command on two ranks, on the CPU; killed with all its processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = subprocess.Popen(
        [*command, "-m", "upshot", "train", *words],
        env=os.environ | ENVIRONMENT | env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield started
    finally:
        for child in children(started.pid):
            os.kill(child, signal.SIGKILL)
        started.kill()
        started.wait()


def forked(file: str) -> Forked:
    """Two ranks without torchrun, in a fifth of the time."""
    words = json.dumps([[file, "new"]])
    return Forked("tests.training.learner.distributed.rank_runs", words, env=os.environ | ENVIRONMENT, cwd=ROOT)


def children(pid: int) -> list[int]:
    """The ranks, in order."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def after_steps(folder: Path, steps: int) -> None:
    """Return when this many steps have their line."""
    wait_until(lambda: (folder / "metrics.jsonl").is_file() and len(metrics(folder)) >= steps, 120)


def begin(folder: Path, **settings: Any) -> str:
    """The file of a recipe for a long run."""
    made = recipe(folder, warm=False, **{"steps": 100_000, "save": {"every": 0}, "more": reward("Lottery"), **settings})
    file = folder.with_suffix(".yaml")
    file.write_text(dump_recipe(made))
    return str(file)


def state(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "method"), [(signal.SIGTERM, "rl"), (signal.SIGINT, "sft")])
def test_a_signal_saves_the_same_step_on_all_ranks_and_the_run_resumes(
    number: int, method: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with torchrun(begin(folder, method=method)) as agent:
        after_steps(folder, 3)
        agent.send_signal(number)
        agent.wait()
    latest = RunFolder.open(folder).latest()
    assert state(folder)["state"] == "stopped" and latest is not None
    assert latest.step == metrics(folder)[-1]["step"]
    longer = latest.step + 2
    with torchrun("--resume", str(folder), f"train.steps={longer}") as agent:
        told, _ = agent.communicate()
    assert agent.returncode == 0, told
    assert told.count("run folder") == 1, "the first rank alone tells"
    train(recipe(tmp_path / "one", warm=False, method=method, steps=longer, save={"every": 0}, more=reward("Lottery")))
    one, two = ([line["train/grad_norm"] for line in metrics(where)] for where in (tmp_path / "one", folder))
    assert two == pytest.approx(one, rel=1e-2) and state(folder)["state"] == "finished"


@pytest.mark.parametrize(("lost", "start"), [(0, torchrun), (1, forked)], ids=["first", "second, forked"])
def test_a_killed_rank_ends_all_at_once_with_the_reason_and_the_last_checkpoint_is_complete(
    lost: int, start: Callable[[str], AbstractContextManager[Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with start(begin(folder, save={"every": 2})) as agent:
        after_steps(folder, 5)
        process = children(agent.pid)[lost]
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: agent.poll() is not None, 25)  # torch's own limit is minutes
        told, _ = agent.communicate()
    assert agent.returncode and f"rank {lost} (process {process}) has ended" in told
    latest = RunFolder.open(folder).latest()
    assert latest is not None and latest.step % 2 == 0
    assert main(["train", "--quiet", "--resume", str(folder), f"train.steps={latest.step + 1}"]) == 0
    assert metrics(folder)[-1]["step"] == latest.step + 1


@pytest.mark.slow
@pytest.mark.parametrize(("where", "saved"), [("play", True), ("learn", False)])
def test_an_error_on_one_rank_ends_all_ranks_with_its_reason(where: str, saved: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = begin(folder, more=reward("BreaksOnOneRank"), save={"every": 2})
    with torchrun(file, UPSHOT_TEST_BREAKS=where) as agent:
        told, _ = agent.communicate()
    assert agent.returncode and "this rank is broken" in told, told
    latest, last = RunFolder.open(folder).latest(), metrics(folder)[-1]["step"]
    assert latest is not None and state(folder)["state"] == "stopped"
    assert (latest.step == last) if saved else (latest.step == last - last % 2)
    if saved:
        assert "rank 1: this rank is broken" in told and state(folder)["reason"] == "rank 1: this rank is broken"


@pytest.mark.slow
def test_a_dry_run_and_a_mistake_in_a_recipe_are_printed_once(tmp_path: Path) -> None:
    file = begin(tmp_path / "run")
    with torchrun(file, "--dry-run", "--trust") as agent:  # its metric is the user's own code
        told, _ = agent.communicate()
    assert agent.returncode == 0 and told.count("ranks      2 processes") == 1
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("{}")
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"phase": "rl", "step": 1}) + "\n")
    with torchrun(file) as agent:
        told, _ = agent.communicate()
    assert agent.returncode and told.count("already holds a run") == 1
