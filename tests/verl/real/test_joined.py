"""A run that joins a Ray of two raylets, as on a real cluster: training, SIGTERM, kill -9, resume, export."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from tests.support.verl_cpu.raylets import two_raylets
from tests.verl.real.under_way import UnderWay, model_in, under_way
from tests.verl.real.verl_run import VerlRun, verl_run
from upshot.cli import main
from upshot.core.files import read_jsonl
from upshot.run import folder as runs

PROMPTS, REPLIES = 4, 4
LAST = 6


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("joined")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_raylets() as found:
        yield found


@pytest.fixture(scope="module")
def stopped(here: Path, address: str) -> UnderWay:
    """A run on both nodes that receives SIGTERM in its second step and saves only every hundredth."""
    few = ("train.save.every=100", "upshot.watch.grace_s=300", "keep_rollouts=0", "trainer.nnodes=2")
    # A path that is right only in the folder where the command was typed.
    few += ("credit.by=reply", f"model.path={model_in(here).relative_to(here)}")
    with under_way(here / "run", *few, "--join", address) as run:
        run.until(lambda: run.steps >= 1)
        run.process.send_signal(signal.SIGTERM)
        run.ended()
        return run


@pytest.fixture(scope="module")
def killed(stopped: UnderWay) -> UnderWay:
    """The run, resumed and killed (kill -9) after a step that was saved."""
    before = stopped.steps
    with under_way(stopped.folder, "train.save.every=1", recipe="") as run:
        run.until(lambda: run.steps >= before + 1 and run.saved >= before + 1)
        os.kill(run.process.pid, signal.SIGKILL)
        run.ended()
        return run


@pytest.fixture(scope="module")
def finished(killed: UnderWay) -> VerlRun:
    """The run, resumed to its end, on the same Ray."""
    words = ("--resume", str(killed.folder))
    steps = max(LAST, killed.saved + 1)
    return verl_run(killed.folder, f"train.steps={steps}", "eval.every=2", recipe="", words=words, ranks=0)


def test_sigterm_lets_the_step_end_and_saves_it(stopped: UnderWay) -> None:
    assert stopped.process.returncode == 128 + signal.SIGTERM
    lines = read_jsonl(stopped.folder / "metrics.jsonl")
    assert lines and stopped.saved == lines[-1]["step"] == stopped.steps
    assert f"--resume {stopped.folder}" in stopped.words


def test_a_killed_run_leaves_the_lines_up_to_its_checkpoint_and_frees_the_ray_it_joined(
    killed: UnderWay, finished: VerlRun
) -> None:
    assert killed.process.returncode == -signal.SIGKILL
    assert finished.said.count("continuing after step") == 2, "both resumed runs joined the same Ray"


def test_every_step_has_one_line_and_all_its_replies(finished: VerlRun) -> None:
    steps = [line["step"] for line in finished.lines if "reward/mean" in line]
    assert steps == list(range(1, steps[-1] + 1)) and len(steps) >= LAST
    played = [line["step"] for line in read_jsonl(finished.folder / "rollouts.jsonl")]
    assert played == [step for step in steps for _ in range(PROMPTS * REPLIES)]
    assert all(norm > 0 for norm in finished.series("train/grad_norm"))
    assert finished.series("eval/reward/mean"), "evaluations are lines as well"
    found = runs.read(finished.folder)
    assert (found.status["state"], found.status["step"]) == ("finished", steps[-1])


def test_the_model_is_exported(finished: VerlRun, tmp_path: Path) -> None:
    assert main(["export", str(finished.folder), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
