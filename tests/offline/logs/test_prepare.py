"""`upshot logs prepare`: from a log to a recipe that trains, with and without a model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from upshot.cli import main

SMALL = ("--fit-user", "--base", "tiny", "--steps", "2", "--replies", "6", "--samples", "2", "--rounds", "1")
SMALL = (*SMALL, "--max-tokens", "4", "--quiet")
TRAIN = ("train.steps=1", "train.prompts_per_step=2", "train.group_size=2", "reward.max_missing=1", "--quiet")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Calls about orders: whoever is asked to send the parcel back is content."""
    monkeypatch.chdir(tmp_path)
    rng, lines = random.Random(0), []
    for number in range(60):
        order, asks = rng.randrange(10, 20), rng.random() < 0.5
        said = [("user", f"please refund order {order}"), ("assistant", "which one ?" if asks else f"refund {order}")]
        said += (
            [("user", f"order {order}"), ("assistant", "done")]
            if asks
            else [("tool", "refunded"), ("assistant", "done")]
        )
        messages = [{"role": role, "content": text} for role, text in said]
        lines.append({"messages": messages, "solved": asks, "customer": f"c{number % 20}", "kind": "ab"[number % 2]})
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_without_a_model_the_outcomes_become_a_recipe(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "prepare", str(log), "--out", "out", "--quiet"]) == 0
    recipe = yaml.safe_load(Path("out/recipe.yaml").read_text())
    assert recipe["extends"] == "kto" and Path(recipe["train"]["data"]).is_file()
    assert "held out by customer: 6 of 60 conversations" in capsys.readouterr().out


def test_a_log_without_conversations_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text("nothing\n")
    assert main(["logs", "prepare", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "broken line (not JSON) (log.jsonl, line 1)" in capsys.readouterr().err


def test_from_the_log_to_a_trained_policy_with_the_validity_below_its_table(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", "prepare", str(log), "--out", "out", *SMALL]) == 0
    validity = json.loads(Path("out/validity.json").read_text())
    assert validity["replies"] + validity["missing"] == 6 and validity["verdict"] in validity["text"]
    assert validity["text"] in Path("out/recipe.yaml").read_text()
    assert "calibration" in Path("out/logs.html").read_text()
    assert main(["train", "out/recipe.yaml", *TRAIN, "eval.every=0", "run_dir=run"]) == 0
    models = "base=out/fitted,trained=run"
    assert main(["eval", "out/recipe.yaml", "--models", models, "--goals", "2", "--out", "table", "--quiet"]) in (0, 1)
    assert validity["verdict"] in capsys.readouterr().out
    assert validity["text"] in Path("table/table.md").read_text()


def test_other_settings_are_refused_until_another_folder_is_named(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", "prepare", str(log), "--out", "out", "--quiet"]) == 0
    assert main(["logs", "prepare", str(log), "--out", "out", "--held-out", "0.3", "--quiet"]) == 2
    assert "was begun with other settings (held_out: 0.1, now 0.3)" in capsys.readouterr().err
