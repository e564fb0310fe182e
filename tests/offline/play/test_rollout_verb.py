"""`upshot rollout`, `eval RECIPE` and `sweep` on a tiny model: what is printed, saved and resumed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest
import yaml

from tests.offline.play.conftest import THIMBLE
from tests.patience import patience
from tests.support.forked import Forked
from upshot.cli import main
from upshot.core.errors import UserError
from upshot.core.files import read_jsonl
from upshot.offline.statistics import student_quantile
from upshot.offline.sweep import cell_text, plan_runs, tell_fixed


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "thimble.yaml"
    file.write_text(yaml.safe_dump(THIMBLE))
    return str(file)


def test_a_rollout_prints_trees_with_rewards_and_trains_nothing(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["rollout", recipe, "--n", "2", "--replies", "3"]) == 0
    told = capsys.readouterr().out
    assert told.count("prompt slots/train/") == 2 and told.count("reply 3") == 2 and "future 2" in told
    assert max(map(len, told.splitlines())) <= 80 and "6 replies, reward" in told
    assert not (tmp_path / "runs").exists()
    assert main(["rollout", recipe, "--n", "1", "--json", "--seed", "3"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2 and "total" in lines[0]["reward"]


def test_rollout_plays_the_checkpoint_of_a_run(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", str(run_folder), "--n", "1"]) == 0
    assert "its best checkpoint" in capsys.readouterr().err


def test_any_task_has_a_held_out_table_with_intervals_that_resumes(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first = f"old={run_folder}/checkpoints/rl-000001"
    assert main(["eval", str(run_folder), "--models", first, "--rows", "3", "--json", "--quiet"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["columns"][1:] == ["reward", "k-tokens", "verifier"]
    assert table["cells"]["old"]["reward"]["n"] == 3 and "low" in table["cells"]["old"]["reward"]
    both = f"{first},new={run_folder}/checkpoints/rl-000002"
    assert main(["eval", str(run_folder), "--models", both, "--rows", "3", "--json", "--quiet"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert "difference" in table["cells"]["new"]["reward"]
    lines = (tmp_path / "eval-thimble" / "rollouts.jsonl").read_text().splitlines()
    assert len(lines) == 6  # the three of the first run were not played again
    assert main(["eval", str(run_folder), "--models", both, "--judge", "scripted:ok"]) == 2
    assert "models.judge=…" in capsys.readouterr().err


def test_a_run_is_compared_with_its_starting_model_by_default(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(run_folder), "--rows", "3", "--json", "--quiet"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert list(table["cells"]) == ["start", "trained"], "also where the run began from a new model"
    cell = table["cells"]["trained"]
    assert cell["reward"]["n"] == table["cells"]["start"]["reward"]["n"] == 3
    verdicts = [line["scores"]["verifier"]["value"] for line in read_jsonl(tmp_path / "eval-thimble/rollouts.jsonl")]
    assert cell["verifier"]["mean"] == pytest.approx(sum(verdicts[3:]) / 3), "in the unit of the reward beside it"


def test_a_sweep_trains_every_combination_once_and_reports_mean_and_interval(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sweep", recipe, "train.steps=1", "eval.every=0", "train.lr=[1e-3,1e-2]", "--seeds", "2", "--json"]
    assert main([*words, "--metric", "reward/mean"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["setting"] for row in table["rows"]] == ["train.lr=0.001", "train.lr=0.01"]
    cell = table["rows"][0]["metrics"]["reward/mean"]
    assert len(cell["values"]) == 2 and cell["low"] <= cell["mean"] <= cell["high"]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/metrics.jsonl")}
    assert len(written) == 4
    assert main([*words, "--metric", "reward/mean"]) == 0  # all are finished: nothing is trained again
    assert written == {path: path.stat().st_mtime_ns for path in written}
    assert json.loads(capsys.readouterr().out)["rows"] == table["rows"]


def test_a_sweep_lists_its_runs_before_training(recipe: str) -> None:
    settings = plan_runs(recipe, ["train.lr=[1e-3,1e-2]", "futures.samples=[[2],[2,2]]", "seed=5"], seeds=2)
    assert len(settings) == 4 and [run.seed for run, _ in settings[0].runs] == [5, 6]
    assert len({path for setting in settings for _, path in setting.runs}) == 8
    assert settings[1].runs[0][0].futures.samples == [2, 2]


def test_an_override_of_a_sweep_must_have_an_effect_in_some_run(recipe: str) -> None:
    fixed = "train.schedule.min_lr=0.1"
    assert len(plan_runs(recipe, ["train.schedule.name=[constant,cosine]", fixed], seeds=1)) == 2
    with pytest.raises(UserError, match=r"min_lr has no effect with train\.schedule\.name=constant"):
        plan_runs(recipe, ["train.lr=[1e-3,1e-2]", fixed], seeds=1)


@pytest.mark.parametrize(
    ("words", "seeds", "said"),
    [
        (["train.lr=3"], 1, "fixed in all runs: train.lr=3\nnothing is varied; give a key several values as a list"),
        (["train.lr=[3]"], 2, "only the seed is varied; give"),
        (["train.lr=[1,2]", "seed=5"], 1, "fixed in all runs: seed=5\n"),
        (["train.lr=[1,2]"], 1, ""),
    ],
)
def test_a_sweep_says_what_it_does_not_vary(words: list[str], seeds: int, said: str) -> None:
    assert tell_fixed(words, seeds).startswith(said) and bool(said) == bool(tell_fixed(words, seeds))


def test_students_quantiles_match_published_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 30: 2.042}
    assert all(abs(student_quantile(0.975, freedom) - t) < 1e-3 for freedom, t in table.items())
    assert cell_text({"values": [1.0], "missing": 0, "mean": 1.0, "low": 1.0, "high": 1.0}) == "1 (1)"


def test_recipes_are_compared_by_the_keys_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "diff", "classmate-mini", "classmate-mini"]) == 0
    assert main(["recipe", "diff", "collabllm-grpo", "collabllm-ppo"]) == 1
    told = capsys.readouterr().out
    assert "train.method" in told and "train.optimizer.betas" not in told
    assert main(["recipe", "show", "quickstart", "--changed"]) == 0
    shown = capsys.readouterr().out
    assert "task.name" in shown and "model.exact" not in shown


def test_a_run_folder_is_served_by_its_best_checkpoint(run_folder: Path) -> None:
    command = ["upshot", "serve", str(run_folder), "--port", "0", "--name", "thimble"]
    with Forked(*command, env=os.environ) as server:
        try:
            told = []
            while "serving" not in (told[-1] if told else ""):
                told.append(server.stdout.readline())
                assert told[-1], told
            assert any("its best checkpoint" in line for line in told)
            address = told[-1].partition(" at ")[2].split()[0]
            asked = {"model": "thimble", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            said = httpx.post(f"{address}/chat/completions", json=asked, timeout=patience(60)).json()
            assert said["choices"][0]["message"]["role"] == "assistant" and said["usage"]["completion_tokens"] <= 3
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait() == 130, "as of any program that Ctrl-C ended"
