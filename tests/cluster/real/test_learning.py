"""What is learned on verl: the first step is local mode's, classmates and PPO train."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.real.verl_run import SMALL, VerlRun, verl_run

SAME = ("reward/mean", "reward/extrinsic", "reward/intrinsic", "reward/group_std", "metric/verifier", "train/tokens")
"""What a first step with the same draws has in common with local mode's, by name."""


def locally(folder: Path, *overrides: str, recipe: str = "quickstart") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of the same recipe in local mode."""
    command = [sys.executable, "-m", "upshot.cli", "train", recipe, f"run_dir={folder}", *overrides, "--quiet"]
    subprocess.run(command, check=True, timeout=600)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] not in ("warm-start", "sft")]


def trains(run: VerlRun, steps: int) -> None:
    """Hold that every step moved the weights by a finite gradient, and that sampler and trainer agree."""
    norms = run.series("train/grad_norm")
    assert len(norms) == steps and all(math.isfinite(norm) and norm > 0 for norm in norms)
    assert max(run.series("verl/training/rollout_probs_diff_max")) < 1e-4


def test_the_first_step_is_that_of_local_mode(tmp_path: Path) -> None:
    told = (*SMALL, "train.steps=1", "train.advantage=grpo", "eval.every=0")
    run = verl_run(tmp_path / "verl", *told)
    trains(run, 1)
    (local,) = locally(tmp_path / "local", *told)
    (line,) = [line for line in run.lines if "train/grad_norm" in line]
    assert {name: line[name] for name in SAME} == pytest.approx({name: local[name] for name in SAME}, abs=1e-5)
    assert line["train/grad_norm"] == pytest.approx(local["train/grad_norm"], rel=1e-2)


def test_ppo_trains_policy_and_critic(tmp_path: Path) -> None:
    run = verl_run(tmp_path / "ppo", *SMALL, "train.steps=3", "train.method=ppo", "train.kl=0.01", "eval.every=0")
    trains(run, 3)
    assert len(run.series("value/mean")) == 3 and len(run.series("policy/kl_to_reference")) == 3
    assert all(math.isfinite(norm) and norm > 0 for norm in run.series("verl/critic/grad_norm"))


def test_classmates_train_thoughts_and_their_parts_are_told(tmp_path: Path) -> None:
    locally(tmp_path / "peer", "train.steps=30", "train.save_every=0", recipe="classmate-mini-peer")
    (peer,) = (tmp_path / "peer" / "checkpoints").glob("sft-*")
    own = ("train.prompts_per_step=4", "train.group_size=4", "warm_start.steps=60", "eval.monitor=null")
    more = ("train.steps=2", "train.save_every=0", "train.dynamic_sampling=1", f"models.peer={peer}")
    run = verl_run(tmp_path / "run", *own, *more, recipe="classmate-mini")
    trains(run, 2)
    assert run.series("part/classmate") and run.series("part/main")
