"""`upshot logs prepare`: from a log to a recipe that trains, with and without a model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import yaml

import upshot
from upshot.cli import main
from upshot.core.conversation import Message
from upshot.models.base import Request
from upshot.offline.logs.prepare import context_of
from upshot.offline.logs.read import LoggedConversation
from upshot.offline.logs.store import TalkStore

SMALL = ("--fit-user", "--base", "tiny", "--steps", "2", "--replies", "6", "--samples", "2", "--rounds", "1")
SMALL = (*SMALL, "--max-tokens", "4", "--quiet")
TRAIN = ("train.steps=1", "train.prompts_per_step=2", "train.group_size=2", "reward.max_missing=1", "--quiet")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Calls about orders; a customer who is asked to return the parcel is satisfied."""
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


def test_rows_come_from_some_conversations_and_all_are_counted(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "prepare", str(log), "--out", "out", "--conversations", "20", "--quiet"]) == 0
    told = capsys.readouterr().out
    assert "60 conversations of 60 records" in told
    assert "of 20 conversations; no rows are made from the other 40 (--conversations)" in told


def test_a_log_without_conversations_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text("nothing\n")
    assert main(["logs", "prepare", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "broken line (not JSON) (log.jsonl, line 1)" in capsys.readouterr().err


def test_a_log_becomes_a_trained_policy_and_its_validity_is_reported(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", "prepare", str(log), "--out", "out", *SMALL]) == 0
    validity = json.loads(Path("out/validity.json").read_text())
    assert validity["replies"] + sum(validity["missing"].values()) == 6 and validity["verdict"] in validity["text"]
    assert validity["text"] in Path("out/recipe.yaml").read_text()
    assert "calibration" in Path("out/logs.html").read_text()
    assert main(["train", "out/recipe.yaml", "--dry-run"]) == 0
    assert main(["train", "out/recipe.yaml", *TRAIN, "eval.every=0", "run_dir=run"]) == 0
    models = "base=out/fitted,trained=run"
    assert main(["eval", "out/recipe.yaml", "--models", models, "--goals", "2", "--out", "table", "--quiet"]) in (0, 1)
    assert validity["verdict"] in capsys.readouterr().out
    assert validity["text"] in Path("table/table.md").read_text()


def answer(request: Request) -> str:
    """A chat model that extracts goals (two facts, one of them made up), plays the user and says how a conversation
    ended."""
    if request.schema is None:
        return "Good."
    wanted = request.schema["properties"]
    if "facts" in wanted:
        order = re.search(r"refund order (\d+)", request.prompt[0].content)
        assert order is not None
        return json.dumps({"goal": "a refund", "facts": [f"order {order[1]}", "lives in Rome"], "persona": "terse"})
    return json.dumps({"current_answer": "", "thought": "", "response": "yes, order 12"})


def test_with_an_endpoint_goals_are_extracted_once_and_checked_against_the_log(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upshot.Trainer.tiny(["please", "refund", "order", "done", "which", "one", "?", "yes"], max_tokens=8).save("model")
    words = ["logs", "prepare", str(log), "--out", "out", "--base", "model", *SMALL[5:]]
    words += ["--model", "scripted:tests.offline.logs.test_prepare:answer"]
    assert main([*words, "--max-calls", "20"]) == 2, "an empty budget stops it"
    assert main([*words, "--max-calls", "500"]) == 0
    told = capsys.readouterr().out
    assert "goals: 60 of 60 conversations, 60 facts; 60 more were dropped" in told
    lines = [json.loads(line) for line in Path("out/goals.jsonl").read_text().splitlines()]
    assert len(lines) == 60 and all(line["facts"][0].startswith("order ") for line in lines)
    recipe = yaml.safe_load(Path("out/recipe.yaml").read_text())
    assert recipe["futures"]["user"]["name"] == "llm" and recipe["model"]["path"] == "model"
    assert json.loads(Path("out/validity.json").read_text())["simulated"] == 1.0


def test_a_new_tiny_user_model_must_be_fitted(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "prepare", str(log), "--out", "out", "--base", "tiny"]) == 2
    assert "add --fit-user" in capsys.readouterr().err


def test_changed_settings_need_another_folder(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "prepare", str(log), "--out", "out", "--quiet"]) == 0
    assert main(["logs", "prepare", str(log), "--out", "out", "--held-out", "0.3", "--quiet"]) == 2
    assert "was started with other settings (held_out: 0.1, now 0.3)" in capsys.readouterr().err


def test_json_output_has_realism_and_validity_even_if_nothing_is_left_to_do(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for _ in range(2):
        assert main(["logs", "prepare", str(log), "--out", "out", *SMALL, "--json"]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0] == printed[1]
    assert printed[0]["realism"]["transcripts"] > 0 and printed[0]["validity"]["verdict"]
    assert any("identified by a classifier" in line for line in printed[0]["account"])


def test_the_fitted_model_sees_the_longest_conversation_and_what_it_cannot_see_is_counted() -> None:
    def talk(words: int) -> LoggedConversation:
        return LoggedConversation((Message("user", "hi"), Message("assistant", "word " * words)), system="be kind")

    def context(*words: int) -> tuple[int, list[str]]:
        store = TalkStore(":memory:")
        store.fill(map(talk, words), 100)
        return context_of([count for (count,) in store.rows("words")], 2048)

    assert context(10, 20) == (512, [])
    assert context(10, 997) == (1500, [])
    size, (note,) = context(10, 5000, 3000)
    assert size == 2048 and note.startswith("2 of 3 conversations have more than 2,048 words")


def test_without_outcomes_nothing_is_rewarded_and_the_assistant_is_imitated(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talks = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("\n".join(json.dumps({"messages": talk["messages"]}) for talk in talks))
    assert main(["logs", "prepare", str(log), "--out", "out", *SMALL]) == 0
    recipe = yaml.safe_load(Path("out/recipe.yaml").read_text())
    assert recipe["extends"] == "sft" and Path(recipe["train"]["data"]).is_file() and "reward" not in recipe
    assert "The logs have no outcomes" in Path("out/recipe.yaml").read_text()
    assert not list(Path("out").glob("kto*"))
    assert "no held-out conversation has an outcome" in capsys.readouterr().out


def test_logs_that_cannot_be_split_are_refused_before_rows_are_made(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_text(log.read_text().splitlines()[0])
    for share in ("0.1", "0"):
        assert main(["logs", "prepare", str(log), "--out", f"out{share}", "--held-out", share, "--quiet"]) == 2
        assert "0 of 1 conversations are held out (by customer)" in capsys.readouterr().err
        assert not list(Path(f"out{share}").glob("*.parquet"))
    assert main(["logs", "prepare", str(log), "--out", "out0", "--held-out", "0.5", "--quiet"]) == 2
    assert "started with other settings" not in capsys.readouterr().err, "another --held-out is tried, as advised"


def test_without_outcomes_on_the_held_out_side_the_recipe_learns_from_them_and_evaluates_nothing(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talks = [json.loads(line) for line in log.read_text().splitlines()]
    plain = [{"messages": talk["messages"], "time": at} for at, talk in enumerate(talks)]
    log.write_text(
        "\n".join(json.dumps({**one, "solved": one["time"] % 2} if one["time"] < 5 else one) for one in plain)
    )
    assert main(["logs", "prepare", str(log), "--out", "out", "--quiet"]) == 0
    recipe = yaml.safe_load(Path("out/recipe.yaml").read_text())
    assert recipe["extends"] == "kto" and "eval" not in recipe
    assert "good outcomes are those from 0.5 (--good-from): 2; bad ones: 3" in capsys.readouterr().out
