"""`eval.judge`: held-out replies have a judge of their own, and training keeps its judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.workshop import metrics, recipe
from upshot.core.errors import UserError
from upshot.models.base import Request
from upshot.rollout.check_names import check_names
from upshot.run.run import train


def kind(request: Request) -> str:
    """A judge that always approves."""
    return '{"thought": "fine", "accuracy": 1}'


def strict(request: Request) -> str:
    """A judge that never approves."""
    return '{"thought": "wrong", "accuracy": 0}'


JUDGED: dict[str, Any] = {
    "models": {"judge": f"scripted:{__name__}:kind", "outsider": f"scripted:{__name__}:strict"},
    "reward": {"metrics": ["accuracy"]},
    "futures": {"name": "none"},
    "eval": {"every": 1, "rows": 3, "judge": "outsider"},
}


def test_held_out_replies_are_judged_by_the_judge_of_evaluation(tmp_path: Path) -> None:
    train(recipe(tmp_path / "run", steps=2, prompts_per_step=2, group_size=2, more=JUDGED))
    lines = metrics(tmp_path / "run")
    learned = [line["metric/accuracy"] for line in lines if "metric/accuracy" in line]
    reported = [line["eval/metric/accuracy"] for line in lines if "eval/metric/accuracy" in line]
    assert (learned, reported) == ([1.0, 1.0], [0.0, 0.0, 0.0])
    last = next(line for line in reversed(lines) if "reward/mean" in line)
    assert last["model/judge/judge/calls"] == 8
    assert last["model/outsider/judge/calls"] == 6


def test_a_metric_with_a_judge_of_its_own_keeps_it(tmp_path: Path) -> None:
    own = {"name": "accuracy", "judge": "judge"}
    train(
        recipe(
            tmp_path / "run",
            steps=1,
            prompts_per_step=2,
            group_size=2,
            more=JUDGED | {"reward": {"metrics": [own]}},
        )
    )
    assert {line.get("eval/metric/accuracy", 1.0) for line in metrics(tmp_path / "run")} == {1.0}


def test_a_judge_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    wrong = JUDGED | {"eval": {"every": 1, "judge": "outsidr"}}
    with pytest.raises(UserError, match=r"eval.judge is 'outsidr'.*did you mean 'outsider'"):
        check_names(recipe(tmp_path / "run", steps=1, more=wrong))
