"""The table: whole conversations, held-out goals, missing scores, resuming, the proactive row, Abg-CoQA."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from upshot.cli.eval import add_arguments
from upshot.core.errors import BudgetExceeded, UserError
from upshot.offline.table import Column, make_cells, make_columns
from upshot.offline.tabulate import run

DATA = Path(__file__).parent / "data"
ACTORS = "scripted:collab_actors"


@pytest.fixture(autouse=True)
def actors(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DATA))
    import collab_actors

    return collab_actors


def evaluate(out: Path, *words: str, models: str = "base={0}:policy,proactive={0}:policy") -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    who = ["--user", f"{ACTORS}:user", "--judge", f"{ACTORS}:judge", "--models", models.format(ACTORS)]
    return run(parser.parse_args(["--out", str(out), "--json", *who, *words]))


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]


def table_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "table.json").read_text())


def test_the_paper_table_has_task_metric_k_tokens_and_interactivity(tmp_path: Path, actors: Any) -> None:
    assert evaluate(tmp_path / "out", "--task", str(actors.goals(tmp_path, 12)), "--split", "all") == 0
    table = table_of(tmp_path / "out")
    assert table["columns"] == ["", "accuracy", "k-tokens", "interactivity"]
    assert [row[0] for row in table["rows"]] == ["base", "proactive"]
    proactive = table["cells"]["proactive"]
    assert proactive["interactivity"]["mean"] == 100.0 and proactive["accuracy"]["mean"] == 0.0
    assert (
        proactive["interactivity"]["difference"]["p"] < 0.05 and "difference" not in table["cells"]["base"]["accuracy"]
    )
    assert proactive["k-tokens"]["n"] == 12 and 0 < proactive["k-tokens"]["mean"] < 1
    assert "| proactive |" in (tmp_path / "out" / "table.md").read_text()


def test_a_metric_that_never_returns_is_missing_after_the_time_given(tmp_path: Path, actors: Any) -> None:
    metrics = ["--metrics", "accuracy=1,tests.training.helpers:Flaky=0", "--call-seconds", "0.2"]
    evaluate(tmp_path / "out", "--task", str(actors.goals(tmp_path, 12)), "--split", "all", *metrics)
    parts = [line["reward"]["terms"] for line in lines_of(tmp_path / "out")]
    assert "timeout" in json.dumps(parts) and table_of(tmp_path / "out")["cells"]["base"]["accuracy"]["n"] == 12


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan", "soon"])
def test_an_invalid_time_limit_is_refused(seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluate(tmp_path / "out", "--task", "x", f"--call-seconds={seconds}")
    assert f"'{seconds}' is not a positive number of seconds" in capsys.readouterr().err


def test_conversations_are_whole_and_end_with_the_policy_or_the_user_leaving(tmp_path: Path, actors: Any) -> None:
    evaluate(tmp_path / "out", "--task", str(actors.goals(tmp_path, 12)), "--split", "all")
    lines = lines_of(tmp_path / "out")
    for line in lines:
        roles = [m["role"] for m in line["messages"]]
        assert len(roles) <= 14 and roles[0] == "user" and line["futures"] == [] and line["step"] == 0
        assert (line["ended"], roles[-1]) in (("messages", "assistant"), ("user", "user"))
        assert set(line["reward"]) >= {"total", "terms", "means"}
        marks = set(actors.MARK.findall(json.dumps(line["messages"])))
        assert len(marks) == 1
    assert {line["ended"] for line in lines} == {"messages", "user"}
    assert max(len(line["messages"]) for line in lines) == 14


def test_every_model_hears_the_same_opening(tmp_path: Path, actors: Any) -> None:
    evaluate(tmp_path / "out", "--task", str(actors.goals(tmp_path, 6)), "--split", "all")
    openings: dict[str, set[str]] = {}
    for line in lines_of(tmp_path / "out"):
        openings.setdefault(line["row"], set()).add(line["messages"][0]["content"])
    assert len(openings) == 6 and all(len(said) == 1 for said in openings.values())


def test_the_proactive_row_is_the_same_model_with_the_proactive_prompt(
    tmp_path: Path, actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    plain = actors.policy

    async def listening(request: Any) -> str:
        seen.append(request.prompt[0].content)
        assert request.prompt[0].role == "system" and sum(m.role == "system" for m in request.prompt) == 1
        return await plain(request)

    monkeypatch.setattr(actors, "policy", listening)
    evaluate(tmp_path / "out", "--task", str(actors.goals(tmp_path, 2)), "--split", "all")
    from upshot.tasks.collabllm import PLAIN, PROACTIVE

    assert set(seen) == {PLAIN, PROACTIVE}


def test_only_held_out_goals_are_played(tmp_path: Path, actors: Any) -> None:
    file = actors.goals(tmp_path, 20)
    evaluate(tmp_path / "out", "--task", str(file))
    from upshot.tasks.base import tasks

    task = tasks.create("collabllm", {"file": str(file)})
    played = {line["row"] for line in lines_of(tmp_path / "out")}
    assert played == {row.id for row in task.rows("test")} and len(played) == 2
    assert not played & {row.id for row in task.rows("train")}


def test_missing_scores_are_shown_and_leave_the_statistics(tmp_path: Path, actors: Any) -> None:
    file = str(actors.goals(tmp_path, 20))
    evaluate(tmp_path / "out", "--task", file, "--split", "all", "--max-messages", "4",
             models="base={0}:policy,flaky={0}:failing_policy")  # fmt: skip
    table = table_of(tmp_path / "out")
    flaky = table["cells"]["flaky"]["accuracy"]
    assert flaky["missing"]["http_error"] == 1 and flaky["missing"]["timeout"] > 0
    assert flaky["n"] == 20 - sum(flaky["missing"].values()) == flaky["difference"]["n"]
    assert "missing)" in table["rows"][1][1]
    failed = [line for line in lines_of(tmp_path / "out") if line["missing"]]
    assert failed and all("missing" in line["reward"]["total"] for line in failed)


def test_a_stopped_evaluation_resumes_without_playing_anything_twice(tmp_path: Path, actors: Any) -> None:
    file = str(actors.goals(tmp_path, 6))
    evaluate(tmp_path / "whole", "--task", file, "--split", "all")
    with pytest.raises(BudgetExceeded):
        evaluate(tmp_path / "out", "--task", file, "--split", "all", "--max-calls", "100", "--concurrency", "2")
    before = (tmp_path / "out" / "rollouts.jsonl").read_text()
    with (tmp_path / "out" / "rollouts.jsonl").open("a") as torn:
        torn.write('{"step": 0, "ro')
    evaluate(tmp_path / "out", "--task", file, "--split", "all")
    after = (tmp_path / "out" / "rollouts.jsonl").read_text()
    assert before and after.startswith(before)
    keys = [line["key"] for line in lines_of(tmp_path / "out")]
    assert len(keys) == len(set(keys)) == 12
    logged = [json.loads(text) for text in (tmp_path / "out" / "openings.log").read_text().splitlines()[1:]]
    opened = [line["row"] for line in logged if "row" in line]
    assert len(opened) == len(set(opened)) == 6, "an opening was asked for twice"
    assert table_of(tmp_path / "out")["cells"] == table_of(tmp_path / "whole")["cells"]


@pytest.mark.parametrize(("file", "key"), [("openings.log", "counts"), ("rollouts.jsonl", "speaker")])
def test_a_log_of_an_earlier_version_is_one_clear_line(file: str, key: str, tmp_path: Path, actors: Any) -> None:
    """Openings used to have no counts: resuming such a log must be refused clearly, not fail with a KeyError."""
    task, out = ["--task", str(actors.goals(tmp_path, 2)), "--split", "all"], tmp_path / "out"
    assert evaluate(out, *task, models="base={0}:policy") == 0
    lines = [json.loads(line) for line in (out / file).read_text().splitlines()]
    (out / file).write_text("".join(json.dumps({k: v for k, v in line.items() if k != key}) + "\n" for line in lines))
    with pytest.raises(UserError, match=f"{file}' was started by an earlier version .* has no '{key}'.*another --out"):
        evaluate(out, *task, models="base={0}:policy,other={0}:policy")


def test_conversations_that_failed_are_played_again_by_the_next_run(
    tmp_path: Path, actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(actors.goals(tmp_path, 30))
    words = ["--task", file, "--split", "all", "--max-messages", "4", "--concurrency", "4"]
    models = "base={0}:policy_behind_a_cable"
    monkeypatch.setenv("ACTOR_DOWN", "yes")
    with pytest.raises(UserError, match="20 of the last 20 conversations failed, mostly: connection"):
        evaluate(tmp_path / "out", *words, models=models)
    assert evaluate(tmp_path / "few", *words, "--goals", "3", models=models) == 1, "a row without any score"
    monkeypatch.delenv("ACTOR_DOWN")
    assert evaluate(tmp_path / "out", *words, models=models) == 0
    lines = lines_of(tmp_path / "out")
    assert len(lines) == len({line["key"] for line in lines}) == 30 and not any(line["missing"] for line in lines)


def test_a_row_can_be_added_later_but_not_changed(tmp_path: Path, actors: Any) -> None:
    file = str(actors.goals(tmp_path, 3))
    evaluate(tmp_path / "out", "--task", file, "--split", "all", models="base={0}:policy")
    evaluate(tmp_path / "out", "--task", file, "--split", "all", models="base={0}:policy,trained={0}:policy")
    assert len(lines_of(tmp_path / "out")) == 6
    with pytest.raises(UserError, match="another model or prompt"):
        evaluate(tmp_path / "out", "--task", file, "--split", "all", models="base={0}:failing_policy")


def test_abg_coqa_distinguishes_asking_from_answering(tmp_path: Path) -> None:
    words = ["--task", "abg-coqa", "--file", str(DATA / "samples" / "coqa_abg_test.json")]
    ruled = ["--metrics", "{action_accuracy: {by: rule}, token_amount: -0.0005}"]
    evaluate(tmp_path / "judged", *words, models="asks={0}:asks,answers={0}:answers")
    evaluate(tmp_path / "ruled", *words, *ruled, models="asks={0}:asks,answers={0}:answers")
    for out in ("judged", "ruled"):
        found = table_of(tmp_path / out)["cells"]
        assert found["asks"]["action accuracy (ambiguous)"]["mean"] == 100.0
        assert found["asks"]["action accuracy (unambiguous)"]["mean"] == 0.0
        assert found["answers"]["action accuracy (ambiguous)"]["mean"] == 0.0
        assert found["answers"]["action accuracy (unambiguous)"]["mean"] == 100.0
        assert found["asks"]["macro accuracy"]["mean"] == found["answers"]["macro accuracy"]["mean"] == 50.0
        assert (
            0 < found["asks"]["macro F1"]["mean"] < 50.0
        )  # a policy that always asks has an F1 of 0 for the clear questions
        assert found["answers"]["action accuracy"]["mean"] == 50.0
    assert all(len(line["messages"]) == 2 for line in lines_of(tmp_path / "judged"))


def test_prepared_validation_rows_are_played_from_their_goals(tmp_path: Path, actors: Any) -> None:
    from upshot.offline.data.prepare import PrepareSettings, prepare

    prepare(
        str(DATA / "samples" / "multiturn-math-hard.jsonl"), tmp_path, PrepareSettings("rl", default_system="Be kind.")
    )
    words = ["--task", "math-hard", "--file", str(tmp_path), "--metrics", "token_amount"]
    evaluate(tmp_path / "out", *words, "--user", "script", models="base={0}:policy")
    lines = lines_of(tmp_path / "out")
    assert len(lines) == 1  # two histories of one held-out goal are one conversation
    assert lines[0]["messages"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "base"], "should read name=spec"),
        (["--models", "a=scripted:ok,a=scripted:ok"], "names 'a' twice"),
        (["--system", "bse=none"], "did you mean 'base'"),
        (["--system", "base=proactiv"], "did you mean 'proactive'"),
        (["--metrics", "acuracy"], "did you mean 'accuracy'"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_write(
    tmp_path: Path, actors: Any, words: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path / "out", "--task", str(actors.goals(tmp_path, 3)), "--split", "all", *words)


def run_folder(tmp_path: Path, older: str, newer: str) -> None:
    """A run folder whose newest checkpoint is the tiny model."""
    for position, name in enumerate((older, newer)):
        checkpoint = tmp_path / "run" / "checkpoints" / name
        shutil.copytree(tmp_path / "tiny", checkpoint)
        (checkpoint / "state.json").write_text(json.dumps({"phase": "rl", "step": position}))
        os.utime(checkpoint / "state.json", (position, position))


def line(row: str, model: str, value: float | None, group: str = "a") -> dict[str, Any]:
    score = {"value": value} if value is not None else {"missing": "judge: timeout"}
    return {"row": row, "model": model, "scores": {"accuracy": score}, "groups": {"kind": group}}


def test_a_missing_score_is_not_a_zero_in_the_mean() -> None:
    lines = [line("1", "base", 1.0), line("2", "base", None), line("3", "base", 1.0)]
    (cell,) = make_cells(lines, ["base"], [Column("accuracy")])["base"]
    assert cell.estimate is not None and cell.estimate.mean == 100.0 and cell.missing == {"judge: timeout": 1}
    assert cell.text.endswith("(1 missing)")


def test_a_column_without_any_score_is_a_dash() -> None:
    (cell,) = make_cells([line("1", "base", None)], ["base"], [Column("accuracy")])["base"]
    assert cell.text == "– (1 missing)"


def test_columns_follow_the_paper_whatever_the_order_of_metrics() -> None:
    found = make_columns(["document->bleu", "mine", "interactivity", "token_amount"], [], None)
    assert [column.title for column in found] == ["BLEU", "k-tokens", "interactivity", "mine"]


def test_a_local_model_plays_the_base_and_the_proactive_row_and_is_loaded_once(
    tmp_path: Path, actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from upshot.config.recipe import TinyConfig
    from upshot.models import local
    from upshot.models.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer(["find", "the", "number", "of", "it", "is", "what?"])
    tokenizer.save_pretrained(tmp_path / "tiny")
    tiny_model(TinyConfig(), tokenizer, 0).save_pretrained(tmp_path / "tiny")
    loads: list[str] = []
    load = local.load_local
    monkeypatch.setattr(local, "load_local", lambda name, *rest: (loads.append(name), load(name, *rest))[1])
    words = ["--task", str(actors.goals(tmp_path, 3)), "--split", "all", "--metrics", "token_amount"]
    words += ["--user", "script", "--max-tokens", "6", "--max-messages", "4"]
    folder = str(tmp_path / "tiny")
    evaluate(tmp_path / "out", *words, models=f"base={folder},proactive={folder}")
    run_folder(tmp_path, older="rl-000001", newer="rl-000002")
    evaluate(tmp_path / "runs", *words, models=f"trained={tmp_path / 'run'}")
    assert loads.pop().endswith("run/checkpoints/rl-000002")
    lines = lines_of(tmp_path / "out")
    assert len(lines) == 6 and len(loads) == 1 and not any(line["missing"] for line in lines)
    table = table_of(tmp_path / "out")["cells"]
    assert table["base"]["k-tokens"]["n"] == 3 and table["proactive"]["k-tokens"]["mean"] > 0


def test_all_rows_are_counted_by_the_named_tokenizer(tmp_path: Path, actors: Any) -> None:
    from upshot.models.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer(["it", "is.", "So."])
    tokenizer.save_pretrained(tmp_path / "words")
    words = [
        "--task",
        str(actors.goals(tmp_path, 2)),
        "--split",
        "all",
        "--metrics",
        "token_amount",
        "--user",
        "script",
    ]
    words += ["--max-messages", "2", "--tokenizer", str(tmp_path / "words")]
    evaluate(tmp_path / "out", *words, models="base={0}:policy,other={0}:answers")
    for line in lines_of(tmp_path / "out"):
        said = [m["content"] for m in line["messages"] if m["role"] == "assistant"]
        counted = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in said)
        assert line["scores"]["token_amount"]["value"] == counted > 0
