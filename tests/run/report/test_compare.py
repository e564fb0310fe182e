"""Comparing runs: keys that differ, runs of one experiment, the result of each."""

from __future__ import annotations

import json
from pathlib import Path

from upshot.run.report.compare import differences, experiments, result_of, settings_of
from upshot.run.report.curves import read_curves

BASE = "name: a\nseed: 1\nrun_dir: x\ntrain:\n  lr: 3.0e-4\n  steps: 5\nmetrics: [{name: bleu}]\n"


def test_names_and_folders_do_not_count_as_differences() -> None:
    other = BASE.replace("name: a", "name: b").replace("run_dir: x", "run_dir: y").replace("steps: 5", "steps: 7")
    told = differences([settings_of(BASE), settings_of(other), settings_of("train: {lr: 0.1}")])
    assert told["train.steps"] == ["5", "7", "–"] and told["train.lr"] == ["0.0003", "0.0003", "0.1"]
    assert told["metrics.0.name"] == ["bleu", "bleu", "–"] and "name" not in told
    assert differences([settings_of(BASE), settings_of(other.replace("steps: 7", "steps: 5"))]) == {}


def test_an_unreadable_recipe_shows_no_differences() -> None:
    assert settings_of("a: [") == settings_of(None) == settings_of("- a") == {}
    assert differences([settings_of(BASE), {}]) == {}


def test_runs_that_differ_in_their_seed_alone_are_one_experiment() -> None:
    texts = [
        BASE,
        BASE.replace("seed: 1", "seed: 2").replace("name: a", "name: b"),
        BASE.replace("lr: 3", "lr: 4"),
        "",
        "",
        BASE,
    ]
    assert experiments([settings_of(text) for text in texts], list("abcdef")) == ["a", "a", "c", "d", "e", "f"]


def test_a_run_is_summarised_by_its_held_out_reward_if_it_has_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.9, "eval/reward/mean": 0.5}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 3, "reward/mean": 0.3}]))
    assert result_of(read_curves(path)) == {"key": "eval/reward/mean", "last": 0.5, "best": 0.5}
    path.write_text('{"step": 1, "loss/nll": 2.0}\n{"step": 2, "loss/nll": 1.0}\n{"step": 3, "loss/nll": 1.5}\n')
    assert result_of(read_curves(path)) == {"key": "loss/nll", "last": 1.5, "best": 1.0}
    path.write_text("")
    assert result_of(read_curves(path)) is None
