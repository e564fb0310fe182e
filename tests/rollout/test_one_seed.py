"""One seed, one run: the same recipe and seed write the same metrics file, except for times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from upshot.config.load import load_recipe
from upshot.run.run import train

SMALL = [
    "model.tiny.hidden=32", "model.tiny.layers=2", "model.tiny.heads=2", "model.tiny.mlp=64", "warm_start.steps=2",
    "warm_start.batch=8", "train.steps=2", "train.prompts_per_step=2", "train.group_size=4", "eval.every=1",
    "eval.rows=4",
]  # fmt: skip


def metrics(run: Path, *overrides: str) -> list[dict[str, Any]]:
    train(load_recipe("quickstart", [*SMALL, f"run_dir={run}", *overrides]).recipe)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def test_two_runs_with_one_seed_write_the_same_metrics_and_another_seed_is_another_run(tmp_path: Path) -> None:
    first = metrics(tmp_path / "a")
    assert metrics(tmp_path / "b") == first
    assert metrics(tmp_path / "c", "seed=1") != first
