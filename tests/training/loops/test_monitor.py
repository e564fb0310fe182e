"""A recipe's monitor: its numbers are in the line of every evaluation, also by task; a wrong one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.workshop import metrics, recipe
from upshot.cli import main
from upshot.core.errors import UserError, user_error_in
from upshot.rollout.check_names import check_names
from upshot.run.run import train

THINKS: dict[str, Any] = {
    "task": {"name": "ciphers", "coded": 0.5, "limit": 32},
    "models": {"watcher": "scripted:tests.training.helpers:monitor"},
    "episode": {"max_tokens": 24},
    "futures": {"name": "none"},
    "reward": {"metrics": ["verifier"]},
    "warm_start": {"steps": 12, "batch": 16, "lr": 1e-2},
    "eval": {"every": 1, "rows": 6, "monitor": "watcher"},
}


def test_every_evaluation_logs_how_well_the_monitor_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe(tmp_path / "run", steps=2, prompts_per_step=2, group_size=2, more=THINKS))
    looked = [line for line in metrics(tmp_path / "run") if "eval/monitor/valid" in line]
    assert [line["step"] for line in looked] == [1, 2, 2], "before each step, and the finished model"
    for line in looked:
        counted = ("valid", "no_thought", "no_verdict", "no_prediction")
        assert sum(line[f"eval/monitor/{name}"] for name in counted) == 6
        assert line["eval/monitor/valid"] == sum(line[f"eval/monitor/{name}"] for name in ("tp", "tn", "fp", "fn"))
        assert line["eval/monitor/gsm8k/valid"] == line["eval/monitor/valid"]
        assert line["eval/monitor/no_verdict"] == line["eval/monitor/no_prediction"] == 0
    assert looked[-1]["eval/monitor/valid"] > 0, "the warm start taught it to think"
    calls = [line["model/watcher/monitor/calls"] for line in metrics(tmp_path / "run") if "reward/mean" in line]
    assert calls[0] == looked[0]["eval/monitor/valid"]
    capsys.readouterr()
    words = ["eval", "monitor", str(tmp_path / "run"), "--judge", THINKS["models"]["watcher"], "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["task"]) for row in found["steps"]] == [(1, "gsm8k"), (2, "gsm8k")]
    assert sum(found["all"][name] for name in ("tp", "tn", "fp", "fn")) == found["all"]["valid"] > 0


def test_the_monitors_calls_count_against_the_budget(tmp_path: Path) -> None:
    with pytest.raises((UserError, BaseExceptionGroup)) as caught:
        train(
            recipe(
                tmp_path / "run",
                steps=2,
                prompts_per_step=2,
                group_size=2,
                more=THINKS | {"budget": {"max_calls": 1}},
            )
        )
    assert "budget of 1 calls is used up" in str(user_error_in(caught.value))


def test_a_monitor_that_is_not_a_model_or_has_nothing_to_predict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eval.monitor is 'watchr'.*did you mean 'watcher'"):
        check_names(recipe(tmp_path, more=THINKS | {"eval": {"every": 1, "monitor": "watchr"}}))
    unverified = THINKS | {"reward": {"metrics": ["token_amount"]}}
    with pytest.raises(UserError, match=r"eval\.monitor predicts the metric 'verifier'"):
        check_names(recipe(tmp_path, more=unverified))
