"""`upshot score FILE` and `upshot eval judge FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from upshot.cli import make_parser
from upshot.cli.eval import add_judge
from upshot.core.errors import BudgetExceeded, UserError
from upshot.core.score import Score
from upshot.models.base import ModelCallError, Request
from upshot.offline.judge import agreement, kappa
from upshot.offline.judge import run as run_judge
from upshot.tasks.datasets.records import read_replies


def say(request: Request) -> str:
    """A judge that accepts replies that mention 'right', and a user and a policy of few words."""
    text = request.prompt[0].content
    if request.schema is None:
        return "Noted."
    if "response" in request.schema["properties"]:
        return json.dumps({"current_answer": "x", "thought": "", "response": "go on"})
    key = next(key for key in request.schema["properties"] if key != "thought")
    return json.dumps({"thought": "", key: int("right" in text.split("<conversation>")[1].split("</conversation>")[0])})


MODEL = "scripted:tests.offline.test_score_file:say"


def score(*arguments: str) -> int:
    """Run `upshot score`."""
    parser = make_parser(["score"])
    args = parser.parse_args(["score", *arguments])
    return args.run(args)


def write(path: Path, rows: list[dict]) -> str:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def lines_of(path: Path) -> list[dict]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def whole(answer: str, **more) -> dict:
    """A finished conversation."""
    said = [("user", "hi"), ("assistant", "Hm?"), ("user", "tea"), ("assistant", answer)]
    return {"messages": [{"role": r, "content": c} for r, c in said], "goal": "tea", "reference": "green", **more}


def test_whole_conversations_are_scored_without_changes(tmp_path: Path, capsys) -> None:
    file = write(tmp_path / "chats.jsonl", [whole("right"), whole("wrong")])
    assert score(file, "--judge", MODEL, "--metric", "accuracy=2") == 0
    lines = lines_of(tmp_path / "chats.jsonl.scores.jsonl")
    assert [line["reward"]["total"]["value"] for line in sorted(lines, key=lambda x: x["row"])] == [1.0, 0.0]
    shown = capsys.readouterr().out
    assert "accuracy" in shown and "0.5000" in shown


def test_candidates_are_scored_with_futures(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "hi"}], "completions": ["right", "no"], "single_turn_prompt": "tea",
           "single_turn_completion": "green"}  # fmt: skip
    file = write(tmp_path / "c.jsonl", [row])
    out = tmp_path / "out.jsonl"
    settings = ["--judge", MODEL, "--user", MODEL, "--policy", MODEL, "--rounds", "1", "--samples", "2"]
    assert score(file, *settings, "--out", str(out), "--metric", "accuracy") == 0
    lines = lines_of(out)
    assert [(line["key"], line["reward"]["total"]["value"]) for line in lines] == [("0#0", 1.0), ("0#1", 0.0)]
    assert [len(line["futures"]) for line in lines] == [2, 2]
    assert lines[0]["futures"][0]["messages"][0]["content"] == "go on"


def test_a_stopped_run_resumes_where_it_was(tmp_path: Path, capsys) -> None:
    file = write(tmp_path / "c.jsonl", [whole("right", id=f"r{i}") for i in range(6)])
    out = tmp_path / "out.jsonl"
    arguments = [file, "--judge", MODEL, "--metric", "accuracy", "--out", str(out), "--at-once", "1"]
    with pytest.raises(BudgetExceeded):
        score(*arguments, "--max-calls", "4")
    assert len(lines_of(out)) == 4
    with out.open("a") as broken:
        broken.write('{"row": "r4", "rew')  # killed in the middle of a line
    assert score(*arguments) == 0
    assert sorted(line["row"] for line in lines_of(out)) == [f"r{i}" for i in range(6)]
    assert "4 of 6 rows are in" in capsys.readouterr().out


def test_missing_scores_are_counted_with_their_reason(tmp_path: Path, capsys) -> None:
    row = whole("right")
    del row["reference"]
    file = write(tmp_path / "c.jsonl", [row])
    assert score(file, "--judge", MODEL, "--metric", "accuracy") == 1
    assert "missing 1 x bad_row: accuracy: no reference" in capsys.readouterr().out


def test_wrong_input_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        score(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="row 1 has neither"):
        score(write(tmp_path / "x.jsonl", [{"text": "hm"}]), "--judge", MODEL)
    with pytest.raises(UserError, match="NAME=WEIGHT"):
        score(write(tmp_path / "y.jsonl", [whole("x")]), "--judge", MODEL, "--metric", "accuracy=high")


def test_records_in_the_published_layouts_are_read() -> None:
    rl = {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}], "completion": "yo",
        "reward_model": {"style": "rule", "ground_truth": "4"}, "data_source": "math",
        "extra_info": {"interaction_kwargs": {"single_turn_prompt": "2+2", "task_desc": "sums"}},
    }  # fmt: skip
    (record,) = read_replies([rl])
    assert (record.row.goal, record.row.reference, record.row.source) == ("2+2", "4", "math")
    assert record.row.meta["task_desc"] == "sums" and record.replies == ("yo",)
    (chat,) = read_replies([whole("end")], futures=True)
    assert [m.content for m in chat.row.messages] == ["hi", "Hm?", "tea"] and chat.said[0].content == "end"


def judge(*arguments: str) -> int:
    """Run `upshot eval judge`."""
    parser = argparse.ArgumentParser()
    add_judge(parser)
    return run_judge(parser.parse_args(list(arguments)))


def test_eval_judge_measures_agreement_with_labels(tmp_path: Path, capsys) -> None:
    rows = [whole("right", label=1)] * 6 + [whole("wrong", label=0)] * 3 + [whole("right", label=0)]
    out = tmp_path / "verdicts.jsonl"
    assert judge(write(tmp_path / "l.jsonl", rows), "--judge", MODEL, "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert "10 rows rated, 0 missing" in shown and "agreement   0.900" in shown and "yes/no 1" in shown
    assert len(lines_of(out)) == 10
    with pytest.raises(UserError, match="row 1: the label 'gold' is None"):
        judge(write(tmp_path / "l.jsonl", rows), "--judge", MODEL, "--label", "gold")


def test_agreement_excludes_missing_rows_and_counts_them() -> None:
    report = agreement([Score(1.0), Score.missing("judge: timeout"), Score(0.0)], [1, 1, 1])
    assert report["valid"] == 2 and report["missing"] == 1 and report["accuracy"] == 0.5


def test_kappa_and_its_interval_match_hand_computed_values() -> None:
    assert kappa([(True, True), (False, False)]) == 1.0
    assert kappa([(True, True), (True, False), (False, True), (False, False)]) == 0.0
    report = agreement([Score(1.0)] * 100, [1] * 90 + [0] * 10)
    assert (report["accuracy_low"], report["accuracy_high"]) == pytest.approx((0.8256, 0.9448), abs=1e-3)


asked: list[str] = []
down = False


def unsteady(request: Request) -> str:
    """The judge, which fails at times."""
    asked.append(request.prompt[0].content)
    if down and "second" in asked[-1]:
        raise ModelCallError("refused")
    return say(request)


UNSTEADY = "scripted:tests.offline.test_score_file:unsteady"


def test_failed_rows_are_scored_again_and_earlier_spending_counts(tmp_path: Path) -> None:
    global down
    lacking = whole("right", id="c")
    del lacking["reference"]
    file = write(tmp_path / "c.jsonl", [whole("right first", id="a"), whole("right second", id="b"), lacking])
    arguments = [file, "--judge", UNSTEADY, "--metric", "accuracy"]
    out = tmp_path / "c.jsonl.scores.jsonl"
    down = True
    assert score(*arguments) == 1
    assert {line["row"]: line["reward"]["total"].get("missing") for line in lines_of(out)} == {
        "a": None,
        "b": "refused",
        "c": "bad_row",
    }
    down = False
    asked.clear()
    with pytest.raises(BudgetExceeded, match="2 calls is used up"):
        score(*arguments, "--max-calls", "2")
    assert asked == []
    assert score(*arguments, "--max-calls", "3") == 1
    assert len(asked) == 1 and "second" in asked[0]
    assert {line["row"]: line["reward"]["total"].get("value") for line in lines_of(out)} == {
        "a": 1.0,
        "b": 1.0,
        "c": None,
    }


def test_results_of_other_settings_or_texts_are_not_reused(tmp_path: Path) -> None:
    file = write(tmp_path / "c.jsonl", [whole("right"), whole("right")])
    with pytest.raises(UserError, match="needs a judge"):
        score(file, "--metric", "accuracy")
    assert score(file, "--judge", MODEL, "--metric", "accuracy") == 0
    with pytest.raises(UserError, match=r"started with other settings \(metrics: .*another --out"):
        score(file, "--judge", MODEL, "--metric", "interactivity")
    write(tmp_path / "c.jsonl", [whole("right"), whole("wrong now")])
    assert score(file, "--judge", MODEL, "--metric", "accuracy") == 0
    lines = sorted(lines_of(tmp_path / "c.jsonl.scores.jsonl"), key=lambda line: line["row"])
    assert [line["reward"]["total"]["value"] for line in lines] == [1.0, 0.0]
    (tmp_path / "mine.jsonl").write_text('{"precious": 1}\n')
    with pytest.raises(UserError, match="choose another --out"):
        score(file, "--judge", MODEL, "--metric", "accuracy", "--out", str(tmp_path / "mine.jsonl"))
    assert (tmp_path / "mine.jsonl").read_text() == '{"precious": 1}\n'


def test_a_users_metric_whose_code_changed_is_a_different_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = write(tmp_path / "c.jsonl", [whole("right")])
    (tmp_path / "own_score_metric.py").write_text("def half(conversation):\n    return 0.5\n")
    words = (file, "--metric", "own_score_metric:half")
    assert score(*words) == 0 and score(*words) == 0
    with (tmp_path / "own_score_metric.py").open("a") as more:
        more.write("# changed\n")
    with pytest.raises(UserError, match=r"started with other settings \(code: .*another --out"):
        score(*words)


def test_a_line_separator_inside_a_text_loses_no_row(tmp_path: Path) -> None:
    file = write(tmp_path / "c.jsonl", [whole("right\u2028so"), whole("wrong")])
    for _ in range(2):
        assert score(file, "--judge", MODEL, "--metric", "accuracy") == 0
    assert sum(b"reward" in line for line in (tmp_path / "c.jsonl.scores.jsonl").read_bytes().split(b"\n")) == 2


def test_thoughts_are_shown_to_neither_user_nor_judge(tmp_path: Path) -> None:
    rows = [{"prompt": "hi", "completion": "<think>right, I think</think>wrong", "goal": "g", "reference": "r"}]
    file, out = write(tmp_path / "in.jsonl", [*rows, whole("<think>right</think>wrong")]), tmp_path / "out.jsonl"
    assert score(file, "--judge", MODEL, "--metrics", "accuracy", "--rounds", "0", "--out", str(out)) == 0
    assert [line["reward"]["means"]["accuracy"]["value"] for line in lines_of(out)] == [0.0, 0.0]
    again = tmp_path / "futures.jsonl"
    words = ("--policy", MODEL, "--user", MODEL, "--rounds", "1", "--samples", "1")
    assert score(file, "--judge", MODEL, "--metrics", "accuracy", *words, "--out", str(again)) == 0
    assert [line["reward"]["means"]["accuracy"]["value"] for line in lines_of(again)] == [0.0, 0.0]
