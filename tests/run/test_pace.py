"""A dry run estimates how long the run takes if that was measured or stated, and otherwise says that it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import upshot
from upshot.run.console import duration
from upshot.run.folder import RunFolder, versions
from upshot.run.pace import estimate_time


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def earlier_run(name: str, seconds: list[float], **settings: object) -> None:
    folder = RunFolder.create(upshot.load("quickstart", run_dir=f"runs/{name}", **settings))
    for step, took in enumerate(seconds, 1):
        folder.append_metrics("rl", step, {"time/step": took})


def test_without_a_measurement_no_time_is_estimated() -> None:
    assert "not estimated: no earlier run of this model" in estimate_time(upshot.load("quickstart"), 40)


def test_the_steps_of_an_earlier_run_of_the_same_model_are_scaled_by_the_tokens_of_a_step() -> None:
    earlier_run("one", [30.0, 2.0, 4.0, 3.0])
    recipe = upshot.load("quickstart")
    same = estimate_time(recipe, 40)
    assert (
        same.startswith("time       about 3 s a step, 2 min in all")
        and "runs/one took 3 s a step (median of 3)" in same
    )
    twice = upshot.load("quickstart", train={"prompts_per_step": 2 * recipe.train.prompts_per_step})
    assert "about 6 s a step, 4 min in all" in estimate_time(twice, 40)
    assert "times 2 for the size of a step" in estimate_time(twice, 40)


def test_runs_of_another_model_method_or_machine_are_not_used() -> None:
    earlier_run("one", [1.0, 1.0])
    assert "not estimated" in estimate_time(upshot.load("quickstart", model={"tiny": {"layers": 1}}), 4)
    assert "not estimated" in estimate_time(upshot.load("quickstart", train={"method": "ppo"}), 4)
    elsewhere = versions() | {"platform": "another machine"}
    Path("runs/one/versions.json").write_text(json.dumps(elsewhere))
    assert "not estimated" in estimate_time(upshot.load("quickstart"), 4)


def test_a_stated_rate_is_named_with_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    from upshot.cli import main

    assert main(["train", "quickstart", "--dry-run", "--tokens-per-second", "1000"]) == 0
    said = capsys.readouterr().out
    assert "time       at least" in said
    assert "at the stated 1000 sampled tokens/s, without learning, users and judges" in said
    assert main(["train", "quickstart", "--dry-run", "--tokens-per-second", "0"]) == 2


def test_times_are_shown_in_readable_units() -> None:
    assert [duration(seconds) for seconds in (0.25, 60, 90, 600, 5400, 36000)] == [
        "0.25 s", "60 s", "1.5 min", "10 min", "1.5 h", "10 h",
    ]  # fmt: skip
