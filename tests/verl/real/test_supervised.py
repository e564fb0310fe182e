"""Supervised training with --engine verl on two ranks: local mode's losses step by step, and resuming."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.patience import patience
from tests.verl.real.under_way import model_in
from upshot.cli import main
from upshot.core.files import read_jsonl

SFT = ("train.method=sft", "warm_start=null", "train.prompts_per_step=8", "task.rows_per_split=64", "model.device=cpu")
LOOKS = ("train.steps=4", "train.save.every=2", "eval.every=2", "eval.rows=7")
SAME = ("loss/nll", "train/grad_norm", "train/lr", "eval/loss/nll")


def train(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "upshot.cli", "train", *words, "--quiet"], check=True, timeout=patience(1000))


def series(run: Path, name: str) -> list[Any]:
    return [line[name] for line in read_jsonl(run / "metrics.jsonl") if name in line]


def test_supervised_training_on_two_ranks_has_local_modes_losses_step_by_step(tmp_path: Path) -> None:
    words = ("quickstart", "credit.by=reply", *SFT, *LOOKS, f"model.path={model_in(tmp_path)}")
    two, one = tmp_path / "two", tmp_path / "one"
    train(*words, f"run_dir={two}", "--engine", "verl", "trainer.n_gpus_per_node=2")
    assert main(["train", *words, f"run_dir={one}", "--quiet"]) == 0
    for name in SAME:
        assert series(two, name) == pytest.approx(series(one, name), rel=1e-4), name
    ours, theirs = (load_file(run / "checkpoints/sft-000004/model.safetensors") for run in (two, one))
    assert all(torch.allclose(weight, theirs[name], atol=1e-4) for name, weight in ours.items())
    train("--resume", str(two), "train.steps=6")
    assert sorted(set(series(two, "step"))) == [1, 2, 3, 4, 5, 6]
