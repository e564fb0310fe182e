"""No goals are mixed up: tests inside Ray for the fault of the published recipe."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: `make test-cluster`")

from tests.verl.real.goals import WORKERS, Secrets
from upshot.config.recipe import TinyConfig
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.verl.process import run

ROWS = 1000


def test_a_thousand_rows_with_a_thousand_goals_through_four_workers_mix_none(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(Secrets().vocabulary())
    tiny_model(TinyConfig(hidden=16, layers=1, heads=2, mlp=32), tokenizer, 0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines: list[str] = []
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    words = [
        sys.executable,
        "-m",
        "tests.verl.real.goals",
        str(tmp_path / "run"),
        str(tmp_path / "model"),
        str(ROWS),
    ]
    code = run(words, env, tmp_path / "log", lines.append)
    assert code == 0, "\n".join(lines[-40:])
    found = json.loads(next(line for line in lines if line.startswith("FOUND ")).removeprefix("FOUND "))
    assert sorted(found["index"]) == list(range(ROWS))
    assert found["heard"] == [float(index) for index in found["index"]]
    assert found["verdicts"] == [1.0] * ROWS
    assert f"{WORKERS} workers" in found["view"][1] and found["not closed"] == []
