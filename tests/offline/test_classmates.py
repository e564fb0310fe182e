"""`classmate-mini` and its demo: both run in miniature; the effect itself is a slow test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from upshot.cli import main
from upshot.config.load import load_recipe
from upshot.config.recipe import TinyConfig
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.offline.demo import classmates
from upshot.offline.demo.classmates import Readability
from upshot.rewards.monitor import MonitorCase, MonitorPrediction
from upshot.run.run import train
from upshot.tasks.ciphers import Ciphers
from upshot.tasks.verifiers.gsm8k import Gsm8kVerifier

TINY = [
    "model.tiny.hidden=16", "model.tiny.layers=1", "model.tiny.heads=2", "model.tiny.mlp=16", "task.limit=32",
    "warm_start.steps=2", "warm_start.batch=4", "train.steps=1", "train.prompts_per_step=2", "train.group_size=2",
]  # fmt: skip


@pytest.fixture
def peer(tmp_path: Path) -> str:
    """A classmate of random weights with its own vocabulary."""
    folder = tmp_path / "a-peer"
    tokenizer = tiny_tokenizer(Ciphers(coded=0).vocabulary())
    tiny_model(TinyConfig(hidden=16, layers=1, heads=2, mlp=16), tokenizer, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_one_step_with_a_classmate_credits_the_thought_with_both_parts(peer: str, tmp_path: Path) -> None:
    overrides = [*TINY, "warm_start.steps=30", "warm_start.batch=16", "warm_start.lr=0.01", f"models.peer={peer}"]
    train(load_recipe("classmate-mini", [*overrides, f"run_dir={tmp_path / 'run'}"]).recipe)
    replies = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(replies) == 4
    handed = [reply for reply in replies if any(future["by"] == "peer" for future in reply["futures"])]
    assert handed, "no reply had a thought to hand on"
    for reply in handed:
        assert {"main", "classmate"} == set(reply["reward"]["parts"])
        assert ["main", "classmate"] in [span["parts"] for span in reply["credit"]]


def test_a_missing_classmate_is_reported_before_the_warm_start(tmp_path: Path) -> None:
    recipe = load_recipe("classmate-mini", [*TINY, "models.peer=./no-peer", f"run_dir={tmp_path / 'run'}"]).recipe
    with pytest.raises(UserError, match=r"there is no folder './no-peer'"):
        train(recipe)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_demo_prints_a_row_for_each_model_and_what_the_classmate_added(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(classmates, "ROWS", 12)
    monkeypatch.setattr(classmates, "SEEDS", 1)
    root = tmp_path / "demo"
    assert main(["demo", "classmates", "--json", *TINY, f"models.peer={peer}", f"run_dir={root}"]) == 0
    table = json.loads(capsys.readouterr().out)
    names = [classmates.WARM, classmates.TWIN, classmates.TAUGHT, "with minus without"]
    assert [row[0] for row in table["rows"]] == names
    assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert set(table["classmate"]) == {"no thought", "a coded one", "a plain one"}
    assert (root / "report.html").is_file()
    twin, taught = (load_recipe(str(root / "seed-0" / name / "recipe.yaml")).recipe for name in ("twin", "classmates"))
    assert twin.futures.name == "none" and taught.futures.name == "classmates"
    shared = {"name", "run_dir", "futures"}
    assert twin.model_dump(exclude=shared) == taught.model_dump(exclude=shared)


def test_an_unknown_demo_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "clasmates"]) == 2
    assert "unknown demo 'clasmates'; did you mean 'classmates'?" in capsys.readouterr().err


def test_replies_without_a_thought_are_missing_and_counted_instead_of_zero() -> None:
    right, none = Score(1.0), Score.missing(Reason.NO_THOUGHT)
    cases = [MonitorCase((), thought, right, Gsm8kVerifier()) for thought in ("4 + 3 = 7 .", "")]
    looks = [MonitorPrediction(case, prediction) for case, prediction in zip(cases, (right, none), strict=True)]
    reading = Readability([right, right], [right, none], looks)
    assert classmates.numbers_of(reading) == [1.0, 1.0, 1.0, 0.5]
    own = dict.fromkeys((classmates.WARM, classmates.TWIN, classmates.TAUGHT), reading)
    table = classmates.make_table({0: own, 1: own}, {"no thought": 0.1})
    assert f"{classmates.TAUGHT} 2" in table["note"]
    assert table["rows"][-1][1] == {"value": 0.0, "low": 0.0, "high": 0.0}


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_with_a_classmate_thoughts_become_readable_and_answers_stay_right(tmp_path: Path) -> None:
    overrides = [f"run_dir={tmp_path / 'demo'}"]
    assert classmates.demo(overrides, quiet=True) == 0
    table = json.loads((tmp_path / "demo" / "table.json").read_text())
    alone = table["classmate"]
    assert alone["no thought"] < 0.3 and alone["a coded one"] < 0.3 and alone["a plain one"] > 0.85
    for own in table["seeds"].values():
        (main_twin, others_twin, f1_twin, _), (main_own, others_own, f1_own, _) = (
            own[name] for name in (classmates.TWIN, classmates.TAUGHT)
        )
        assert others_own >= others_twin + 0.3
        assert abs(main_own - main_twin) <= 0.05
        assert f1_own > f1_twin and f1_own > own[classmates.WARM][2]
