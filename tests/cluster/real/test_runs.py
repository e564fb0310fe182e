"""A run on verl is a run: what is in its folder, going on with it, its model, and supervised training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

import torch
from safetensors.torch import load_file

from tests.cluster.real.verl_run import SMALL, VerlRun, verl_run
from upshot import jsonl, runs
from upshot.cli import main
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.recipe import TinyConfig
from upshot.tasks.slots import Slots
from upshot.train import samples
from upshot.train.best import only_looks
from upshot.train.folder import RunFolder
from upshot.train.sft import pick

STEPS, MORE = 4, 6
OWN = (f"train.steps={STEPS}", "train.save_every=2", "eval.every=2", "eval.rows=8")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    return verl_run(tmp_path_factory.mktemp("runs") / "rl", *SMALL, *OWN)


def rollouts(run: VerlRun) -> list[dict[str, Any]]:
    return jsonl.read(run.folder / "rollouts.jsonl")


def test_every_reply_of_every_step_is_in_rollouts_with_its_tree_reward_and_advantage(first: VerlRun) -> None:
    lines = rollouts(first)
    assert [line["step"] for line in lines] == [step for step in range(1, STEPS + 1) for _ in range(16)]
    assert len({(line["step"], line["key"]) for line in lines}) == len(lines)
    assert any(line["futures"] for line in lines) and all(line["groups"] for line in lines)
    assert all(span["advantage"] is not None for line in lines for span in line["credit"])
    by_step = {line["step"]: line["reward/mean"] for line in first.lines if not only_looks(line)}
    for step, mean in by_step.items():
        own = [line["reward"]["total"]["value"] for line in lines if line["step"] == step]
        assert sum(own) / len(own) == pytest.approx(mean)


def test_the_rows_of_a_step_are_those_of_local_mode_and_the_sampled_ids_lie_beside_them(first: VerlRun) -> None:
    rows, lines = Slots(rows_per_split=64).rows("train"), rollouts(first)
    for step in range(1, STEPS + 1):
        wanted = [rows[item].id for item in pick(64, 4, step - 1, 0)]
        own = [line for line in lines if line["step"] == step]
        assert [line["row"] for line in own[::4]] == wanted
        assert set(samples.read(samples.file_of(first.folder, step))) == {line["key"] for line in own}


def test_evaluations_status_and_report_are_as_in_local_mode(first: VerlRun) -> None:
    looks = {line["step"]: line for line in first.lines if only_looks(line)}
    assert sorted(looks) == [0, 2, 4]
    assert {"eval/reward/mean", "eval/reward/missing", "eval/metric/verifier"} <= set(looks[4])
    run = runs.read(first.folder)
    assert (run.status["state"], run.status["step"]) == ("finished", STEPS)
    assert "conversation" in (first.folder / "report.html").read_text()
    assert run.checkpoint == first.folder / "checkpoints" / "rl-000004"
    assert f"{first.folder / 'report.html'}" in first.said


def test_export_has_the_weights_that_the_run_ended_with_in_float32(
    first: VerlRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """verl's own merger is the independent implementation; it rounds to bfloat16."""
    assert main(["export", str(first.folder), "--out", str(tmp_path / "out")]) == 0
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in ours.values()} == {torch.float32}
    shards = first.folder / "checkpoints" / f"global_step_{STEPS}" / "actor"
    words = ["merge", "--backend", "fsdp", "--local_dir", str(shards), "--target_dir", str(tmp_path / "theirs")]
    subprocess.run([sys.executable, "-m", "verl.model_merger", *words], check=True, timeout=300, cwd=tmp_path)
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert set(ours) == set(theirs) - {"lm_head.weight"}
    assert all(torch.equal(weight.bfloat16(), theirs[name].bfloat16()) for name, weight in ours.items())
    warm = RunFolder.open(first.folder / "warm-start").latest()
    assert warm is not None
    before = load_file(warm.path / "model.safetensors")
    assert not torch.equal(before["model.norm.weight"], ours["model.norm.weight"]), "it has learned"


def test_a_resumed_run_goes_on_with_the_next_rows_and_nothing_is_counted_twice(first: VerlRun) -> None:
    """The lines of step 5 stand for those of a run that was killed after its checkpoint."""
    jsonl.append(first.folder / "metrics.jsonl", [{"phase": "rl", "step": 5, "reward/mean": 9.0}])
    jsonl.append(first.folder / "rollouts.jsonl", [{"step": 5, "row": "of a killed run"}])
    again = verl_run(first.folder, f"train.steps={MORE}", recipe="", words=("--resume", str(first.folder)))
    steps = [line["step"] for line in again.lines if not only_looks(line)]
    assert steps == list(range(1, MORE + 1))
    rows, lines = Slots(rows_per_split=64).rows("train"), rollouts(again)
    assert [line["step"] for line in lines] == [step for step in range(1, MORE + 1) for _ in range(16)]
    for step in (5, 6):
        own = [line["row"] for line in lines if line["step"] == step][::4]
        assert own == [rows[item].id for item in pick(64, 4, step - 1, 0)]
    assert runs.read(first.folder).checkpoint == first.folder / "checkpoints" / "rl-000006"
    assert "going on after 4" in again.said


SFT = ("train.method=sft", "warm_start=null", "train.prompts_per_step=8", "task.rows_per_split=64")
LOOKS = ("train.steps=4", "train.save_every=2", "eval.every=2", "eval.rows=7")


def test_supervised_training_has_local_modes_losses_step_by_step(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(Slots(rows_per_split=64).vocabulary())
    tiny_model(TinyConfig(hidden=64, layers=2, heads=2, mlp=128), tokenizer, 0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = (*SFT, *LOOKS, f"model.path={tmp_path / 'model'}")
    there = verl_run(tmp_path / "verl", *words, ranks=2)
    assert main(["train", "quickstart", f"run_dir={tmp_path / 'local'}", *words, "--quiet"]) == 0
    local = [json.loads(line) for line in (tmp_path / "local/metrics.jsonl").read_text().splitlines()]
    for name in ("loss/nll", "train/grad_norm", "train/lr"):
        assert there.series(name) == pytest.approx([line[name] for line in local if name in line], rel=1e-4)
    assert there.series("eval/loss/nll")[-1] == pytest.approx(local[-1]["eval/loss/nll"], rel=1e-4)
    ours = load_file(tmp_path / "verl/checkpoints/sft-000004/model.safetensors")
    theirs = load_file(tmp_path / "local/checkpoints/sft-000004/model.safetensors")
    assert all(torch.allclose(weight, theirs[name], atol=1e-4) for name, weight in ours.items())
    again = verl_run(there.folder, "train.steps=6", recipe="", words=("--resume", str(there.folder)))
    assert [line["step"] for line in again.lines if not only_looks(line)] == [1, 2, 3, 4, 5, 6]
