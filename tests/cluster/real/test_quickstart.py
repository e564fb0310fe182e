"""The quickstart on two FSDP2 ranks through `upshot train --engine verl --local`, our engine sampling."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.real.verl_run import VerlRun, end, said_by, start, verl_run

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from tests.cluster.real.witness import FOLDER, LIB, STALE, notes

STEPS = 20
LAST = STEPS + 2
"""The negative control: after the update of the last step but one the servers are sent no weights."""
SAME = ("train.save_every=0", f"eval.every={STEPS}", "eval.rows=64")
"""What the runs on verl and in local mode are both told; all else is the quickstart as it ships."""
APART = "verl/training/rollout_probs_diff_max"
"""The largest difference, over all trained tokens of a step, of the sampler's and the trainer's probability."""
AGREE = 1e-4


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def beside(here: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Local mode, which trains while verl starts."""
    command = [sys.executable, "-m", "upshot.cli", "train", "quickstart", f"run_dir={here / 'local'}", "--quiet"]
    process = start([*command, f"train.steps={STEPS}", *SAME], here / "local")
    yield process
    end(process)


@pytest.fixture(scope="module")
def run(here: Path, beside: subprocess.Popen[bytes]) -> VerlRun:
    told = {FOLDER: str(here / "seen"), STALE: str(LAST - 1)}
    return verl_run(here / "verl", f"train.steps={LAST}", *SAME, LIB, seconds=900, env=told)


@pytest.fixture(scope="module")
def local(here: Path, beside: subprocess.Popen[bytes]) -> list[float]:
    """The rewards of local mode, step by step."""
    assert beside.wait(900) == 0, said_by(here / "local").read_text()
    lines = map(json.loads, (here / "local/metrics.jsonl").read_text().splitlines())
    return [line["reward/mean"] for line in lines if line["phase"] == "rl" and "reward/mean" in line]


def test_every_step_has_a_finite_gradient_that_is_not_zero(run: VerlRun) -> None:
    assert [line["step"] for line in run.lines if "train/grad_norm" in line] == list(range(1, LAST + 1))
    assert all(math.isfinite(norm) and norm > 0 for norm in run.series("train/grad_norm"))


def test_sampler_and_trainer_agree_after_every_sync_and_stale_weights_are_found_out(run: VerlRun) -> None:
    *fresh, stale = run.series(APART)
    assert len(fresh) == LAST - 1 and max(fresh) < AGREE
    assert stale > AGREE


def test_the_ids_trained_are_the_ids_sampled(run: VerlRun, here: Path) -> None:
    sampled = {(tuple(said["prompt"]), tuple(said["ids"])) for said in notes(here / "seen", "sampled")}
    trained = [line for line in notes(here / "seen", "trained") if any(line["mask"])]
    assert len(trained) == LAST * 16 * 8
    for line in trained:
        assert (tuple(line["prompt"]), tuple(line["ids"])) in sampled
        assert all(line["mask"])  # a reply of one turn: all of it was sampled


def test_nothing_is_left_where_the_command_was_typed(run: VerlRun, here: Path) -> None:
    assert not (here / "outputs").exists() and not list(here.glob("*.log"))


def test_each_answer_says_the_step_whose_weights_sampled_it(run: VerlRun, here: Path) -> None:
    steps = [said["step"] for said in notes(here / "seen", "sampled")]
    assert steps == sorted(steps) and set(steps) == set(range(LAST - 1))


def test_a_conversation_with_its_futures_stays_on_one_server_and_both_are_used(run: VerlRun, here: Path) -> None:
    servers = defaultdict(set)
    for line in notes(here / "seen", "server"):
        servers[line["request"]].add(line["server"])
    assert {len(found) for found in servers.values()} == {1}
    assert len(set.union(*servers.values())) == 2


def test_the_reward_rises_on_rows_that_were_not_trained(run: VerlRun) -> None:
    # The same rows, greedily; the rewards of training are of other rows at each step.
    before, after, *_ = run.series("eval/reward/mean")
    assert after > before + 0.1


def test_the_reward_ends_where_local_mode_ends(run: VerlRun, local: list[float]) -> None:
    rewards = run.series("reward/mean")
    assert (len(rewards), len(local)) == (LAST, STEPS)
    assert statistics.mean(rewards[STEPS - 5 : STEPS]) == pytest.approx(statistics.mean(local[-5:]), abs=0.1)
