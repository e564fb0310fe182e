"""KTO: what it reads, what it minimises, and that a stopped run resumes without a difference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.workshop import metrics, recipe
from upshot.cli import main
from upshot.config.recipe import KTOConfig
from upshot.core.errors import UserError
from upshot.run.run import train
from upshot.tasks.datasets.records import read_marked_replies
from upshot.training.loops.kto import kto_losses

GOOD = {"prompt": "i want a lamp", "completion": "which size ?", "label": True}
BAD = {"prompt": "i want a lamp", "completion": "here is a red lamp", "label": False}
SETTINGS: dict[str, Any] = {"method": "kto", "warm": False, "prompts_per_step": 2, "lr": 0.01, "kto": {"beta": 0.3}}


def write(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "marked.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


numbers = st.floats(-20, 20)
weights = st.floats(0, 3)


gains = st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=6)


@given(gains, numbers, st.floats(0.01, 2), weights, weights)
def test_the_loss_is_equation_7_of_the_paper(
    replies: list[tuple[float, bool]], divergence: float, beta: float, desirable: float, undesirable: float
) -> None:
    config = KTOConfig(beta=beta, desirable_weight=desirable, undesirable_weight=undesirable)
    gained, good = (torch.tensor(column) for column in zip(*replies, strict=True))
    found = kto_losses(gained.double(), good, divergence, config).tolist()
    for loss, (gain, is_good) in zip(found, replies, strict=True):
        gain = float(torch.tensor(gain))
        above = gain - divergence if is_good else divergence - gain
        value = 1 / (1 + math.exp(-beta * above))
        assert loss == pytest.approx((desirable if is_good else undesirable) * (1 - value), abs=1e-6)


def test_kto_raises_good_replies_and_lowers_bad_ones(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD, BAD)
    train(recipe(tmp_path / "run", data=file, steps=8, **SETTINGS, more={"eval": {"every": 4, "data": file}}))
    lines = metrics(tmp_path / "run")
    assert lines[0]["loss/kto"] == pytest.approx(0.5, abs=1e-6), "it starts at its reference"
    assert lines[0]["kto/kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-2]["kto/good"] > 0.1 and lines[-2]["kto/bad"] < -0.1 and lines[-2]["loss/kto"] < 0.45
    assert lines[-1]["eval/loss/kto"] < lines[-2]["loss/kto"], "after the last step"


def test_a_step_without_bad_replies_logs_nothing_about_them(tmp_path: Path) -> None:
    train(recipe(tmp_path / "run", data=write(tmp_path, GOOD, GOOD), steps=1, **SETTINGS))
    (line,) = metrics(tmp_path / "run")
    assert "kto/good" in line and "kto/bad" not in line


def test_a_stopped_run_resumes_without_a_difference(tmp_path: Path) -> None:
    rows = [{**row, "prompt": f"{row['prompt']} {word}"} for row in (GOOD, BAD) for word in ("please", "red", "now")]
    file = write(tmp_path, *rows)
    train(recipe(tmp_path / "whole", data=file, steps=6, **SETTINGS))
    train(recipe(tmp_path / "parts", data=file, steps=4, **SETTINGS))
    assert main(["train", "--resume", str(tmp_path / "parts"), "train.steps=6", "--quiet"]) == 0
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi", "completion": "ho"}, "row 2 has no 'label'"),
        ({**GOOD, "label": 0.7}, "row 2: label is 0.7; it must be true .good. or false .bad."),
        ({**GOOD, "completion": [{"role": "user", "content": "hi"}]}, "expected one assistant message, found user"),
    ],
)
def test_a_row_that_cannot_be_learned_from_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_marked_replies(write(tmp_path, GOOD, row))


def test_what_kto_cannot_learn_with_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs train\.data"):
        train(recipe(tmp_path / "one", **SETTINGS))
    with pytest.raises(UserError, match=r"set train\.prompts_per_step to 2 or more"):
        train(recipe(tmp_path / "two", data=write(tmp_path, GOOD), **{**SETTINGS, "prompts_per_step": 1}))
    with pytest.raises(UserError, match=r"set eval\.data=FILE"):
        train(recipe(tmp_path / "three", data=write(tmp_path, GOOD), **SETTINGS, more={"eval": {"every": 1}}))


def test_the_dry_run_of_the_recipe_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, GOOD, BAD)
    tiny = "model: {tiny: {hidden: 16, layers: 1, heads: 1, mlp: 32}}\ntask: {name: slots}\n"
    (tmp_path / "tiny.yaml").write_text(f"{tiny}train: {{method: kto, data: {file}, epochs: 1}}\n")
    assert main(["train", str(tmp_path / "tiny.yaml"), "--dry-run"]) == 0
    assert "marked.jsonl: 2 examples" in capsys.readouterr().out
