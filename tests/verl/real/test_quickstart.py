"""The quickstart on two FSDP2 ranks through `upshot train --engine verl`, sampled by our engine.

One run of 20 steps beside one in local mode, then two more steps by `--resume`: what is learned, what is in the folder,
and the resulting model. The tests are ordered as the folder grows.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

import torch
from safetensors.torch import load_file

from tests.patience import patience
from tests.verl.real.verl_run import VerlRun, end, said_by, start_locally, verl_run, wait_for
from tests.verl.real.witness import FOLDER, LIB, STALE, notes
from upshot.cli import main
from upshot.core.files import append_jsonl, read_jsonl
from upshot.run import folder as runs
from upshot.run.folder import RunFolder
from upshot.tasks.slots import SlotsTask
from upshot.training.loops.phase import pick
from upshot.training.metrics.best import is_evaluation

STEPS, PROMPTS, REPLIES = 20, 16, 8
MORE = STEPS + 2
"""The resumed run is also the negative control: after the update of its first step, the servers receive no weights."""
OWN = (
    "train.save.every=10",
    f"eval.every={STEPS}",
    "eval.rows=64",
    f"keep_rollouts={PROMPTS * REPLIES}",
)
"""The settings of both runs, on verl and in local mode; the rest is the quickstart as it ships, which learns along the
tree."""
SAME = ("reward/mean", "reward/extrinsic", "reward/intrinsic", "reward/group_std", "metric/verifier", "train/tokens")
SAME += ("train/sequences", "tree/forks", "tree/branches")
SAME += ("policy/entropy", "policy/clipped", "loss/policy", "train/lr", "train/skipped")
"""What a first step with the same draws has in common with local mode, by name."""
APART = "verl/training/rollout_probs_diff_max"
"""The largest difference between the sampler's and the trainer's probability, over all trained tokens of a step."""
AGREE = 1e-4


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def beside(here: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The run in local mode, which trains while verl starts."""
    process = start_locally(here / "local", f"train.steps={STEPS}", *OWN)
    yield process
    end(process)


@pytest.fixture(scope="module")
def run(here: Path, beside: subprocess.Popen[bytes]) -> VerlRun:
    told = {FOLDER: str(here / "seen")}
    return verl_run(here / "verl", f"train.steps={STEPS}", *OWN, LIB, env=told)


@pytest.fixture(scope="module")
def local(here: Path, beside: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """The steps of local mode."""
    assert wait_for(beside, here / "local") == 0, said_by(here / "local").read_text()
    lines = map(json.loads, (here / "local/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["phase"] == "rl" and not is_evaluation(line)]


@pytest.fixture(scope="module")
def again(run: VerlRun, here: Path) -> VerlRun:
    """The resumed run. The lines of the next step stand for those of a step killed after its checkpoint."""
    append_jsonl(run.folder / "metrics.jsonl", [{"phase": "rl", "step": STEPS + 1, "reward/mean": 9.0}])
    append_jsonl(run.folder / "rollouts.jsonl", [{"step": STEPS + 1, "row": "of a killed run"}])
    told = {FOLDER: str(here / "seen again"), STALE: str(STEPS + 1)}
    words = ("--resume", str(run.folder))
    return verl_run(run.folder, f"train.steps={MORE}", "eval.every=0", recipe="", words=words, env=told)


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "rollouts.jsonl")


def trained(run: VerlRun) -> list[dict[str, Any]]:
    """The lines of training steps, without those of evaluations."""
    return [line for line in run.lines if not is_evaluation(line)]


def test_every_step_has_a_finite_gradient_that_is_not_zero(run: VerlRun) -> None:
    assert [line["step"] for line in trained(run)] == list(range(1, STEPS + 1))
    assert all(math.isfinite(norm) and norm > 0 for norm in run.series("train/grad_norm"))


def test_sampler_and_trainer_agree_after_every_sync(run: VerlRun) -> None:
    apart = run.series(APART)
    assert len(apart) == STEPS and max(apart) < AGREE


def test_the_ids_trained_are_the_ids_sampled(run: VerlRun, here: Path) -> None:
    sampled = {(tuple(said["prompt"]), tuple(said["ids"])) for said in notes(here / "seen", "sampled")}
    lines = [line for line in notes(here / "seen", "trained") if any(line["mask"])]
    assert len(lines) == sum(run.series("train/sequences"))
    assert (
        len([line for line in lines if all(line["mask"])]) == STEPS * PROMPTS * REPLIES
    )  # the replies; others are branches
    for line in lines:
        assert all((tuple(before), tuple(said)) in sampled for before, said in turns(line))


def turns(line: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """What is trained of a row, turn by turn, with everything before it."""
    at = len(line["prompt"])
    ids = [*line["prompt"], *line["ids"]]
    for bit, own in groupby(line["mask"]):
        stop = at + len(list(own))
        if bit:
            yield ids[:at], ids[at:stop]
        at = stop


def test_nothing_is_left_where_the_command_was_typed(run: VerlRun, here: Path) -> None:
    assert not (here / "outputs").exists() and not list(here.glob("*.log"))


def test_each_answer_says_the_step_whose_weights_sampled_it(run: VerlRun, here: Path) -> None:
    steps = [said["step"] for said in notes(here / "seen", "sampled")]
    assert steps == sorted(steps) and set(steps) == set(range(STEPS + 1))  # the last weights are only evaluated


def test_a_conversation_with_its_futures_stays_on_one_server_and_both_are_used(run: VerlRun, here: Path) -> None:
    servers = defaultdict(set)
    for line in notes(here / "seen", "server"):
        servers[line["request"]].add(line["server"])
    assert {len(found) for found in servers.values()} == {1}
    assert len(set.union(*servers.values())) == 2


def test_the_reward_rises_on_rows_that_were_not_trained(run: VerlRun) -> None:
    # The same rows, greedily; training rewards are of different rows at each step.
    before, after = run.series("eval/reward/mean")
    assert after > before + 0.1


def test_the_reward_ends_where_local_mode_ends(run: VerlRun, local: list[dict[str, Any]]) -> None:
    theirs, ours = (statistics.mean(line["reward/mean"] for line in lines[-5:]) for lines in (trained(run), local))
    assert (len(trained(run)), len(local)) == (STEPS, STEPS)
    assert theirs == pytest.approx(ours, abs=0.1)


def test_the_first_step_is_that_of_local_mode(run: VerlRun, local: list[dict[str, Any]], here: Path) -> None:
    there, line = local[0], trained(run)[0]
    assert {name: line[name] for name in SAME} == pytest.approx({name: there[name] for name in SAME}, abs=1e-5)
    assert line["train/grad_norm"] == pytest.approx(there["train/grad_norm"], rel=1e-2)
    theirs, ours = (
        {reply["key"]: reply for reply in rollouts(folder) if reply["step"] == 1}
        for folder in (run.folder, here / "local")
    )
    assert set(theirs) == set(ours) and len(ours) == PROMPTS * REPLIES
    for key, reply in ours.items():
        assert theirs[key]["reward"] == reply["reward"]
        advantages = [span["advantage"] for span in reply["credit"]]
        assert [span["advantage"] for span in theirs[key]["credit"]] == pytest.approx(advantages, abs=1e-5)
        assert branches(theirs[key]) == pytest.approx(branches(reply), abs=1e-5)


def branches(reply: dict[str, Any]) -> list[float]:
    """The rewards of the branches of a reply's futures, with their advantages."""
    own = [branch for future in reply["futures"] for branch in future.get("branches", ())]
    return [number or 0.0 for branch in own for number in (branch["reward"], branch["advantage"])]


def test_every_reply_of_every_step_is_in_rollouts_with_its_tree_reward_and_advantage(run: VerlRun) -> None:
    lines = rollouts(run.folder)
    assert [line["step"] for line in lines] == [at for at in range(1, STEPS + 1) for _ in range(PROMPTS * REPLIES)]
    assert len({(line["step"], line["key"]) for line in lines}) == len(lines)
    assert any(line["futures"] for line in lines) and all(line["groups"] for line in lines)
    assert all(span["advantage"] is not None for line in lines for span in line["credit"])
    for step in trained(run):
        own = [line["reward"]["total"]["value"] for line in lines if line["step"] == step["step"]]
        assert sum(own) / len(own) == pytest.approx(step["reward/mean"])


def rows_of(step: int) -> list[str]:
    """The rows that local mode selects for a step."""
    rows = SlotsTask().rows("train")
    return [rows[item].id for item in pick(len(rows), PROMPTS, step - 1, 0)]


def test_the_rows_of_a_step_are_those_of_local_mode_and_the_sampled_ids_lie_beside_them(run: VerlRun) -> None:
    lines = rollouts(run.folder)
    for step in range(1, STEPS + 1):
        own = [line for line in lines if line["step"] == step]
        assert [line["row"] for line in own[::REPLIES]] == rows_of(step)
        kept = {key.partition("/future/")[0] for key in RunFolder(run.folder).samples(step)}
        assert kept == {line["key"] for line in own}  # and what is trained of their futures


def test_evaluations_status_and_report_are_as_in_local_mode(run: VerlRun) -> None:
    looks = {line["step"]: line for line in run.lines if is_evaluation(line)}
    assert sorted(looks) == [0, STEPS]
    assert {"eval/reward/mean", "eval/reward/missing", "eval/metric/verifier"} <= set(looks[STEPS])
    found = runs.read(run.folder)
    assert (found.status["state"], found.status["step"]) == ("finished", STEPS)
    assert "conversation" in (run.folder / "report.html").read_text()
    assert found.checkpoint == run.folder / "checkpoints" / f"rl-{STEPS:06d}"
    assert f"{run.folder / 'report.html'}" in run.said


def test_export_has_the_weights_that_the_run_ended_with_in_float32(run: VerlRun, tmp_path: Path) -> None:
    """verl's own merger is the independent implementation; it rounds to bfloat16."""
    assert main(["export", str(run.folder), "--out", str(tmp_path / "out")]) == 0
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in ours.values()} == {torch.float32}
    shards = run.folder / "checkpoints" / f"global_step_{STEPS}" / "actor"
    words = ["merge", "--backend", "fsdp", "--local_dir", str(shards), "--target_dir", str(tmp_path / "theirs")]
    subprocess.run([sys.executable, "-m", "verl.model_merger", *words], check=True, timeout=patience(300), cwd=tmp_path)
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert set(ours) == set(theirs) - {"lm_head.weight"}
    assert all(torch.equal(weight.bfloat16(), theirs[name].bfloat16()) for name, weight in ours.items())
    warm = RunFolder.open(run.folder / "warm-start").latest()
    assert warm is not None
    before = load_file(warm.path / "model.safetensors")
    assert not torch.equal(before["model.norm.weight"], ours["model.norm.weight"]), "it has learned"


def test_a_resumed_run_goes_on_with_the_next_rows_and_nothing_is_counted_twice(again: VerlRun) -> None:
    assert [line["step"] for line in trained(again)] == list(range(1, MORE + 1))
    lines = rollouts(again.folder)
    assert [line["step"] for line in lines] == [at for at in range(1, MORE + 1) for _ in range(PROMPTS * REPLIES)]
    for step in range(STEPS + 1, MORE + 1):
        assert [line["row"] for line in lines if line["step"] == step][::REPLIES] == rows_of(step)
    assert runs.read(again.folder).checkpoint == again.folder / "checkpoints" / f"rl-{MORE:06d}"
    assert f"continuing after step {STEPS}" in again.said


def test_stale_weights_are_found_out(again: VerlRun) -> None:
    *fresh, stale = again.series(APART)
    assert len(fresh) == MORE - 1 and max(fresh) < AGREE
    assert stale > AGREE
