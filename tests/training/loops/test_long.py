"""A run with episodes of 16,000 tokens: sampler and learner agree, and it resumes exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.training.workshop import assert_same_steps, metrics
from upshot.cli import main
from upshot.run.folder import RunFolder

EXAMPLE = str(Path(__file__).resolve().parents[3] / "examples" / "archive.yaml")
SMALL = ["task.episodes=2", "train.prompts_per_step=1", "train.group_size=2", "train.save.every=1", "eval.every=0"]
SMALL += ["model.tiny.layers=1", "model.tiny.hidden=16", "model.tiny.heads=1", "model.tiny.mlp=16"]
SMALL += ["model.dtype=float32"]  # on a GPU, too, the drift has to stay within the same bound


def run(folder: Path, steps: int) -> list[dict[str, Any]]:
    assert main(["train", EXAMPLE, "--quiet", f"run_dir={folder}", f"train.steps={steps}", *SMALL]) == 0
    return metrics(folder)


def test_a_run_over_episodes_of_16000_tokens_agrees_with_its_learner_and_resumes_exactly(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", 2)
    words = [sum(len(m["content"].split()) for m in rollout["messages"]) for rollout in rollouts(tmp_path / "straight")]
    assert len(words) == 4 and min(words) >= 16_000, "each word is a token of the tiny model"
    assert all(line["policy/drift_max"] < 1e-4 for line in straight if line.get("phase") == "rl")
    resumed = shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    first, second = RunFolder.open(resumed).checkpoints.saved()
    assert (first.step, second.step) == (1, 2)
    shutil.rmtree(second.path)  # as if the run had been killed in its second step
    assert main(["train", "--quiet", "--resume", str(resumed)]) == 0
    assert_same_steps(metrics(resumed), straight)
    assert rollouts(resumed) == rollouts(tmp_path / "straight")


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """All episodes of a run."""
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
