"""Token drift: sampler's minus learner's log-probabilities, logged with every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.workshop import TINY, datum, learner, metrics, recipe, update
from upshot.config.recipe import TrainConfig
from upshot.run.run import train
from upshot.training.loops.phase import Lesson
from upshot.training.objectives.objectives import PolicyGradient, set_importance


class Batchlike:
    """Two trained tokens."""

    def __init__(self, old: list[float]) -> None:
        self.columns = {"old": torch.tensor(old), "advantages": torch.zeros(len(old))}


def test_drift_is_the_mean_and_the_largest_difference_over_all_micro_batches() -> None:
    objective = PolicyGradient(TrainConfig())
    assert objective.drift() == {}, "what was not sampled has no drift, not none"
    for old, new in (([-1.0, -2.0], [-1.5, -2.0]), ([-3.0], [-3.25])):
        objective.watch(Batchlike(old), torch.tensor(new))  # type: ignore[arg-type]
    assert objective.drift() == {"policy/drift": pytest.approx(0.25), "policy/drift_max": pytest.approx(0.5)}


@pytest.mark.parametrize("lora", [None, {"r": 4, "kind": "rslora"}, {"r": 4, "kind": "dora"}])
def test_a_run_logs_a_drift_of_rounding_only(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    pytest.importorskip("peft")
    more = {"model": {**TINY, "lora": lora}, "reward": {"metrics": [{"name": "tests.training.helpers:Lottery"}]}}
    train(recipe(tmp_path / "run", steps=2, warm=False, lr=1e-2, minibatches=2, more=more))
    for line in metrics(tmp_path / "run"):
        assert 0 <= line["policy/drift"] <= line["policy/drift_max"] < 1e-4


def test_importance_weights_do_not_hide_the_drift(tmp_path: Path) -> None:
    more = {"model": TINY, "reward": {"metrics": [{"name": "tests.training.helpers:Lottery"}]}}
    train(recipe(tmp_path / "run", steps=1, warm=False, importance={"rule": "truncate"}, more=more))
    (line,) = metrics(tmp_path / "run")
    assert 0 < line["policy/drift"] <= line["policy/drift_max"] < 1e-4


@pytest.mark.parametrize(
    "importance",
    [
        {"rule": "truncate", "high": 1.1, "low": 0.9},
        {"rule": "mask", "high": 1.1, "low": 0.9},
        {"rule": "truncate", "level": "sequence", "high": 1.1, "low": 0.9},
    ],
    ids=str,
)
def test_the_only_update_weighs_in_passing_as_a_forward_before_it_would(importance: dict[str, Any]) -> None:
    found = []
    for passing in (True, False):
        own = learner(lr=0.01, importance=importance)
        data = [datum(length, seed) for seed, length in enumerate((7, 12, 5))]
        logs = {} if passing else set_importance(own, data)
        config = own.config.importance if passing else None
        given = Lesson([[one] for one in data], lambda own=own, config=config: PolicyGradient(own.config, config), logs)
        logs = update(own, given, 0)
        found.append((torch.cat([p.detach().flatten() for p in own.parameters]), logs))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-4)  # of updates of 1e-2
    (_, first), (_, second) = found
    assert first.keys() == second.keys() and first["policy/importance_cut"] > 0
    assert {"policy/importance", "policy/importance_max", "policy/drift", "policy/drift_max"} <= first.keys()
    for name, value in first.items():
        assert value == pytest.approx(second[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("rule", ["truncate", "mask"])
@pytest.mark.parametrize("passing", [True, False])
def test_ratio_and_divergence_are_to_the_sampler_also_where_tokens_are_weighed(rule: str, passing: bool) -> None:
    """Before the first update, only the weights in the loss differ."""
    logged = []
    for importance in ("none", rule):
        teacher = learner(importance=importance)
        data = [datum(length, seed) for seed, length in enumerate((7, 12, 5))]
        logs = {} if passing else set_importance(teacher, data)
        config = teacher.config.importance if passing and importance != "none" else None
        objective = PolicyGradient(teacher.config, config)
        logs |= update(teacher, Lesson([[one] for one in data], lambda made=objective: made, logs), 0)
        logged.append({name: logs[f"policy/{name}"] for name in ("ratio", "kl_to_sampler")})
    assert logged[1] == pytest.approx(logged[0], rel=1e-4) and logged[0]["kl_to_sampler"] > 1e-3
