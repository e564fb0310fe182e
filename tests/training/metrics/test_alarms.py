"""An alarm reports a run that collapses and leaves a stable one alone. The curves are of real runs (docs/results)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.workshop import recipe
from upshot.run.run import train
from upshot.training.metrics.alarms import Alarms
from upshot.training.metrics.best import BestTracker

CURVES = Path(__file__).parents[3] / "docs" / "results"


def rung(name: str) -> dict[str, int]:
    """Which metrics raised an alarm in a run, and when first."""
    alarms, first = Alarms(), {}
    for text in (CURVES / f"{name}.jsonl").read_text().splitlines():
        line = json.loads(text)
        alarms.watch(line, line["step"])
        for metric in alarms.ringing:
            first.setdefault(metric, line["step"])
    return first


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_published_objective_on_openings_only_collapses_and_raises_an_alarm(seed: int) -> None:
    found = rung(f"withheld/reply-{seed}")
    assert found["reward/mean"] < 80 and found["eval/reward/mean"] < 90, found


@pytest.mark.parametrize("name", [f"withheld/{kind}-{seed}" for kind in ("tree2", "tree4") for seed in (1, 2, 3)])
def test_along_the_tree_no_alarm_is_raised(name: str) -> None:
    assert not {"reward/mean", "eval/reward/mean"} & set(rung(name))


def steps_until_it_rings(rewards: Iterable[float]) -> int | None:
    alarms = Alarms()
    return next((n for n, reward in enumerate(rewards, 1) if alarms.watch({"reward/mean": reward}, n)), None)


def test_noise_around_a_constant_mean_raises_an_alarm_in_less_than_1_percent_of_runs() -> None:
    draw = numpy.random.default_rng(0)
    kinds = [(2, 0.5), (2, 0.9), (8, 0.05), (32, 0.5)]  # replies a step and how many of them are right
    runs = [draw.binomial(replies, mean, 200) / replies for replies, mean in kinds for _ in range(100)]
    assert sum(steps_until_it_rings(run.tolist()) is not None for run in runs) < len(runs) / 100


@given(seed=st.integers(0, 999), before=st.integers(20, 100), spread=st.floats(0, 0.1))
@settings(max_examples=20)
def test_a_reward_that_falls_to_zero_raises_an_alarm_in_time(seed: int, before: int, spread: float) -> None:
    draw = random.Random(seed)
    fall = [0.8 - 0.8 * step / 15 for step in range(1, 16)]
    rang = steps_until_it_rings(max(0.0, draw.gauss(mean, spread)) for mean in [0.8] * before + fall)
    assert rang is not None and before < rang <= before + 12


def test_the_alarm_names_the_best_step_and_what_to_do() -> None:
    alarms = Alarms()
    for step in range(1, 31):
        alarms.watch({"reward/mean": 0.8 if step <= 15 else 0.2}, step)
    (text,) = alarms.ringing.values()
    assert "fell from 0.8 (steps until 10) to 0.44" in text and "credit.by=tree" in text and "train.kl" in text


def test_lasting_low_evaluations_raise_an_alarm_and_a_single_one_does_not() -> None:
    alarms = Alarms()
    for step, value in enumerate([0.5, 0.9, 0.4, 0.9, 0.4]):
        alarms.watch({"eval/reward/mean": value}, 10 * step)
        assert not alarms.ringing
    alarms.watch({"eval/reward/mean": 0.5}, 50)
    assert "the held-out reward fell from 0.9 at step 10 to 0.5" in alarms.ringing["eval/reward/mean"]


def test_futures_that_no_longer_end_and_repeated_turns_raise_an_alarm() -> None:
    alarms = Alarms()
    for step in range(40):
        late = step >= 20
        alarms.watch({"rollout/futures_left": 0.1 if late else 0.9, "rollout/future_repeats": 0.8 * late}, step)
    assert set(alarms.ringing) == {"rollout/futures_left", "rollout/future_repeats"}


def test_the_run_says_when_its_last_model_is_worse_than_its_best(tmp_path: Path) -> None:
    tracker = BestTracker("eval/reward/mean")
    for step, value in ((0, 0.1), (10, 0.8), (20, 0.3)):
        tracker.add(step, {"eval/reward/mean": value})
    assert tracker.describe_loss() == "eval/reward/mean is 0.3 at the end and was 0.8 after step 10"
    tracker.add(30, {"eval/reward/mean": 0.9})
    assert tracker.describe_loss() == ""
    tracker.add(40, {"eval/reward/mean": 0.9})
    assert tracker.describe_loss() == "", "a model that is as good as the best one has lost nothing"


def test_the_best_checkpoint_is_kept_wherever_there_are_evaluations(tmp_path: Path) -> None:
    train(recipe(tmp_path / "run", warm=False, steps=2, more={"eval": {"every": 1, "rows": 4}}))
    best = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
    assert best["metric"] == "eval/reward/mean"


def test_a_sampler_far_from_the_learner_raises_an_alarm_and_rounding_does_not() -> None:
    alarms = Alarms()
    for step in range(10):
        alarms.watch({"policy/drift": 0.05}, step)
    assert not alarms.ringing
    for step in range(10, 20):
        alarms.watch({"policy/drift": 0.5}, step)
    assert "model.engine.weights=model" in alarms.ringing["policy/drift"]


def test_no_alarm_recommends_what_the_recipe_sets_already() -> None:
    def falls(alarms: Alarms) -> str:
        values = enumerate((0.2, 0.8, 0.8, 0.1, 0.1))
        said = [alarms.watch({"eval/reward/mean": value, "eval/step": step}, step) for step, value in values]
        return " ".join(text for texts in said for text in texts)

    assert "(credit.by=tree)" in falls(Alarms())
    tree = falls(Alarms(trains_futures=True))
    assert "held-out reward fell" in tree and "credit.by" not in tree
