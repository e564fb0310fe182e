"""Supervised training on verl, two ranks: local mode's losses step by step, and going on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

import torch
from safetensors.torch import load_file

from tests.verl.real.verl_run import verl_run
from upshot.cli import main
from upshot.config.recipe import TinyConfig
from upshot.core import jsonl
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.tasks.slots import SlotsTask
from upshot.training.metrics.best import only_looks

SFT = ("train.method=sft", "warm_start=null", "train.prompts_per_step=8", "task.rows_per_split=64")
LOOKS = ("train.steps=4", "train.save.every=2", "eval.every=2", "eval.rows=7")


def test_supervised_training_has_local_modes_losses_step_by_step(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(SlotsTask(rows_per_split=64).vocabulary())
    tiny_model(TinyConfig(hidden=64, layers=2, heads=2, mlp=128), tokenizer, 0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = (*SFT, *LOOKS, f"model.path={tmp_path / 'model'}")
    there = verl_run(tmp_path / "verl", *words, ranks=2)
    assert main(["train", "quickstart", f"run_dir={tmp_path / 'local'}", *words, "--quiet"]) == 0
    local = jsonl.read(tmp_path / "local/metrics.jsonl")
    for name in ("loss/nll", "train/grad_norm", "train/lr"):
        assert there.series(name) == pytest.approx([line[name] for line in local if name in line], rel=1e-4)
    assert there.series("eval/loss/nll")[-1] == pytest.approx(local[-1]["eval/loss/nll"], rel=1e-4)
    ours = load_file(tmp_path / "verl/checkpoints/sft-000004/model.safetensors")
    theirs = load_file(tmp_path / "local/checkpoints/sft-000004/model.safetensors")
    assert all(torch.allclose(weight, theirs[name], atol=1e-4) for name, weight in ours.items())
    again = verl_run(there.folder, "train.steps=6", recipe="", words=("--resume", str(there.folder)))
    assert [line["step"] for line in again.lines if not only_looks(line)] == [1, 2, 3, 4, 5, 6]
