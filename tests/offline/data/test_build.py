"""What `data build` simulates and keeps, and which failures it survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from upshot.cli import make_parser
from upshot.core.errors import BudgetExceeded, UserError
from upshot.offline.data.prepare import PrepareSettings, prepare
from upshot.offline.job import Journal

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def actors(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HERE))
    import collab_actors

    collab_actors.busy = collab_actors.busiest = 0
    return collab_actors


def command(out: Path, file: Path, *more: str, policy: str = "policy", judge: str = "judge") -> list[str]:
    who = ["--policy", f"scripted:collab_actors:{policy}", "--user", "scripted:collab_actors:user"]
    who += ["--judge", f"scripted:collab_actors:{judge}"]
    small = ["--candidates", "3", "--samples", "2", "--proactive-share", "0.34", "--split", "all", "--json"]
    return ["data", "build", "--task", str(file), "--out", str(out), *who, *small, *more]


def build(words: list[str]) -> int:
    parser = make_parser(["data"])
    args = parser.parse_args(words)
    return int(args.run(args))


def rows_of(out: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(out / "candidates.parquet").to_pylist()


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "journal.log").read_text().splitlines()][1:]


def test_rows_and_conversations_have_the_published_format(
    tmp_path: Path, actors: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(command(tmp_path / "out", actors.goals(tmp_path, 6))) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = rows_of(tmp_path / "out")
    assert set(rows[0]) == {
        "prompt", "completion", "conv_id", "turn_id", "score", "single_turn_prompt", "single_turn_completion",
        "single_turn_metadata", "sessions", "rewards",
    }  # fmt: skip
    for row in rows:
        assert row["turn_id"] == len(row["prompt"]) and row["turn_id"] % 2 == 1 and row["turn_id"] + 1 <= 14
        assert [m["role"] for m in row["prompt"]] == (["user", "assistant"] * 7)[: row["turn_id"]]
        assert set(row["rewards"]) == {"accuracy", "interactivity", "token_amount", "MR"}
        assert len(row["sessions"]) == len(row["rewards"]["MR"]) == 2
    assert summary["finished"] == 6 and summary["candidates"] == len(rows)
    assert set(summary["ended"]) <= {"user", "messages"} and max(row["turn_id"] for row in rows) == 13


def test_no_goal_is_mixed_up(tmp_path: Path, actors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTOR_SECONDS", "0.001")  # so that conversations really alternate on the loop
    build(command(tmp_path / "out", actors.goals(tmp_path, 12), "--max-messages", "6"))
    rows = rows_of(tmp_path / "out")
    assert len({row["conv_id"] for row in rows}) == 12
    for row in rows:
        said = json.dumps([row["prompt"], row["completion"], row["sessions"]])
        assert set(actors.MARK.findall(said)) == set(actors.MARK.findall(row["single_turn_prompt"]))
    assert actors.busiest > 12  # conversations, candidates and futures all at once


def test_the_best_candidate_stays_and_the_user_answers_as_in_its_longest_future(tmp_path: Path, actors: Any) -> None:
    build(command(tmp_path / "out", actors.goals(tmp_path, 5)))
    followed = 0
    for line in lines_of(tmp_path / "out"):
        if line.get("best") is None:
            continue
        scores = [c["score"] for c in line["candidates"]]
        assert scores[line["best"]] == max(scores)
        if line.get("next"):
            longest = max(line["candidates"][line["best"]]["sessions"], key=len)
            assert longest[0]["content"] == line["next"]["content"]
            followed += 1
    assert followed > 3


def test_some_candidates_have_the_proactive_prompt(tmp_path: Path, actors: Any) -> None:
    build(command(tmp_path / "out", actors.goals(tmp_path, 3)))
    for line in lines_of(tmp_path / "out"):
        if "candidates" in line:
            assert Counter(c["prompt"] for c in line["candidates"]) == {"proactive": 1, "plain": 2}
            assert line["candidates"][0]["completion"].startswith("What more")
    assert all(m["role"] != "system" for row in rows_of(tmp_path / "out") for m in row["prompt"])


def test_after_kill_9_no_finished_turn_is_repeated_and_the_result_is_the_same(tmp_path: Path, actors: Any) -> None:
    file = actors.goals(tmp_path, 6)
    build(command(tmp_path / "whole", file))
    out = tmp_path / "killed"
    code = "import sys; sys.path[:0] = [sys.argv.pop(1)]; from test_build import build; build(sys.argv[1:])"
    environment = {**os.environ, "ACTOR_SECONDS": "0.02"}
    started = [sys.executable, "-c", code, str(HERE), *command(out, file)]
    kept: list[str] = []
    for already in (4, 14):
        process = subprocess.Popen(started, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while not (out / "journal.log").exists() or (out / "journal.log").read_bytes().count(b"\n") < already:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        now = (out / "journal.log").read_text().splitlines(keepends=True)
        assert now[: len(kept)] == kept
        kept = [line for line in now if line.endswith("\n")]
    build(command(out, file))
    lines = lines_of(out)
    assert (out / "journal.log").read_text().startswith("".join(kept))
    assert max(Counter((line["conv"], line["turn"]) for line in lines).values()) == 1
    assert rows_of(out) == rows_of(tmp_path / "whole")


def test_a_spent_budget_stops_cleanly_and_a_larger_one_resumes(tmp_path: Path, actors: Any) -> None:
    file = actors.goals(tmp_path, 4)
    build(command(tmp_path / "whole", file))
    out = tmp_path / "capped"
    with pytest.raises(BudgetExceeded, match="budget of 150 calls"):
        build(command(out, file, "--max-calls", "150"))
    first = rows_of(out)
    assert lines_of(out)[-1]["spent"]["calls"] <= 150
    with pytest.raises(BudgetExceeded):  # what was spent before counts too
        build(command(out, file, "--max-calls", "150"))
    build(command(out, file, "--max-calls", "100000"))
    assert rows_of(out) == rows_of(tmp_path / "whole") and len(first) < len(rows_of(out))


def test_a_failure_is_missing_with_its_reason_and_the_rest_continues(
    tmp_path: Path, actors: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    build(command(tmp_path / "out", actors.goals(tmp_path, 6), policy="failing_policy"))
    summary = json.loads(capsys.readouterr().out)
    assert summary["finished"] + summary["failed"] == 6 and summary["failed"] >= 1
    assert summary["ended"]["no candidate has a score (reply: http_500)"] == 1
    assert summary["missing"]["reply: http_500"] == 3 and summary["missing"]["reply: timeout"] > 0
    assert all(row["completion"] for row in rows_of(tmp_path / "out"))


def test_an_outage_stops_the_build_and_failures_are_retried_later(
    tmp_path: Path, actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = actors.goals(tmp_path, 30)
    words = command(tmp_path / "out", file, "--max-messages", "4", policy="policy_behind_a_cable")
    build(command(tmp_path / "whole", file, "--max-messages", "4", policy="policy_behind_a_cable"))
    monkeypatch.setenv("ACTOR_DOWN", "yes")
    with pytest.raises(UserError, match=r"of the last 20 turns failed, mostly: no candidate .*reply: connection"):
        build([*words, "--concurrency", "4"])
    failed = [line for line in lines_of(tmp_path / "out") if line.get("failed")]
    assert 10 <= len(failed) < 30 and not rows_of(tmp_path / "out")
    monkeypatch.delenv("ACTOR_DOWN")
    build(words)
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")


def test_a_build_in_which_every_goal_failed_ends_with_1(
    tmp_path: Path, actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTOR_DOWN", "yes")
    assert build(command(tmp_path / "out", actors.goals(tmp_path, 3), policy="policy_behind_a_cable")) == 1


def test_the_reason_of_a_failed_opening_is_kept_and_reported(
    tmp_path: Path, actors: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACTOR_DOWN", "yes")
    words = command(tmp_path / "out", actors.goals(tmp_path, 2))
    assert build([word.replace("collab_actors:user", "collab_actors:policy_behind_a_cable") for word in words]) == 1
    (why,) = {line["why"] for line in lines_of(tmp_path / "out") if line.get("failed")}
    assert json.loads(capsys.readouterr().out)["first_failure"] == why != ""


def test_fault_5_a_failed_judge_gives_no_score_and_is_never_the_best(tmp_path: Path, actors: Any) -> None:
    build(command(tmp_path / "out", actors.goals(tmp_path, 8), "--samples", "1", judge="failing_judge"))
    tried = [c for line in lines_of(tmp_path / "out") for c in line.get("candidates", ())]
    missing = [c for c in tried if c["score"] is None]
    assert missing and len(missing) < len(tried)
    assert all(None in c["rewards"]["accuracy"] + c["rewards"]["interactivity"] for c in missing)
    rows = rows_of(tmp_path / "out")
    assert len(rows) == len(tried) - len(missing) and None not in {row["score"] for row in rows}
    for line in lines_of(tmp_path / "out"):
        if line.get("best") is not None:
            assert line["candidates"][line["best"]]["score"] is not None


def test_concurrent_conversations_are_bounded(tmp_path: Path, actors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTOR_SECONDS", "0.001")
    build(command(tmp_path / "out", actors.goals(tmp_path, 8), "--concurrency", "1", "--max-messages", "4"))
    assert actors.busiest <= 3 * 2 * 2  # candidates × futures × judged metrics of one conversation


def test_other_settings_do_not_continue_a_build(tmp_path: Path, actors: Any) -> None:
    file = actors.goals(tmp_path, 1)
    build(command(tmp_path / "out", file))
    with pytest.raises(UserError, match=r"started with other settings .*rounds: 2, now 1"):
        build(command(tmp_path / "out", file, "--rounds", "1"))


def test_with_window_0_the_user_still_answers_between_turns(tmp_path: Path, actors: Any) -> None:
    build(command(tmp_path / "out", actors.goals(tmp_path, 3), "--rounds", "0", "--max-messages", "6"))
    assert {row["turn_id"] for row in rows_of(tmp_path / "out")} >= {1, 3}


def test_a_scripted_user_says_one_line_per_turn_across_a_resume(tmp_path: Path, actors: Any) -> None:
    file = tmp_path / "goals.jsonl"
    lines = ["MARK-01 one", "MARK-01 two", "MARK-01 three"]
    file.write_text(json.dumps({"goal": "count", "reference": "x", "script": lines}))
    words = command(tmp_path / "out", file)
    words[words.index("scripted:collab_actors:user")] = "script"
    with pytest.raises(BudgetExceeded):
        build([*words, "--max-calls", "50"])
    build(words)
    last = max(rows_of(tmp_path / "out"), key=lambda row: row["turn_id"])
    assert [m["content"] for m in last["prompt"] if m["role"] == "user"] == lines


def test_abg_coqa_is_built_without_a_user(tmp_path: Path, actors: Any) -> None:
    words = command(tmp_path / "out", Path("abg-coqa"), "--file", str(HERE / "samples" / "coqa_abg_test.json"))
    at = words.index("--user")
    del words[at : at + 2]
    build(words)
    assert {row["turn_id"] for row in rows_of(tmp_path / "out")} == {1}


def test_nothing_is_pushed_unless_asked(tmp_path: Path, actors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from upshot.offline.data import build as builder

    pushed: list[tuple[Path, str]] = []
    monkeypatch.setattr(builder, "push", lambda path, name: pushed.append((path, name)))
    words = command(tmp_path / "out", actors.goals(tmp_path, 1), "--max-messages", "2")
    build(words)
    assert not pushed
    build([*words, "--push", "me/my-set"])
    assert pushed == [(tmp_path / "out" / "candidates.parquet", "me/my-set")]


def test_built_data_can_be_prepared(tmp_path: Path, actors: Any) -> None:
    build(command(tmp_path / "out", actors.goals(tmp_path, 8)))
    for purpose in ("sft", "rl", "dpo"):
        summary = prepare(str(tmp_path / "out"), tmp_path / "ready", PrepareSettings(purpose, min_gap=0.01))
        assert summary.rows["train"] > 0 and summary.rows["validation"] > 0, purpose


def test_a_half_written_line_is_dropped_and_two_writers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    with Journal(path, {"a": 1}) as journal:
        journal.append({"n": 1})
        with pytest.raises(UserError, match="another process"):
            Journal(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"n": 2, "text": "cut of')
    with Journal(path, {"a": 1}) as journal:
        assert journal.lines == [{"n": 1}]
        journal.append({"n": 3})
    with Journal(path, {"a": 1}) as journal:
        assert journal.lines == [{"n": 1}, {"n": 3}]


def test_some_of_the_other_candidates_have_no_system_prompt(tmp_path: Path, actors: Any) -> None:
    build(command(tmp_path / "out", actors.goals(tmp_path, 2), "--system-share", "0.5", "--max-messages", "2"))
    for line in lines_of(tmp_path / "out"):
        if "candidates" in line:
            assert Counter(c["prompt"] for c in line["candidates"]) == {"proactive": 1, "plain": 1, "bare": 1}
    with pytest.raises(UserError, match=r"system-share is 1\.5"):
        build(command(tmp_path / "other", actors.goals(tmp_path, 2), "--system-share", "1.5"))


def test_the_proactive_prompt_may_have_the_originals_json_form(tmp_path: Path, actors: Any) -> None:
    file = tmp_path / "goals.jsonl"
    file.write_text(json.dumps({"goal": "Find MARK-01.", "reference": "1", "additional_info": "MARK-01 is a street."}))
    words = ["--proactive", "json", "--max-messages", "2", "--max-tokens", "77"]
    build(command(tmp_path / "out", file, *words, policy="planner"))
    (turn,) = [line for line in lines_of(tmp_path / "out") if "candidates" in line]
    said = {c["prompt"]: c["completion"] for c in turn["candidates"]}
    assert said["proactive"] == "What more about MARK-01? (77 tokens, informed)"
    assert not said["plain"].startswith("{")
