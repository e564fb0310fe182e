"""All replies are counted; those that are kept fit the size and are not chosen by reward; searches find them."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.run.report.conftest import classmate_reply
from tests.run.report.conftest import reply as talk_reply
from upshot.run.folder import RunFolder
from upshot.run.report.replies import INDEX, ReplyIndex, evenly, missing_reason


@given(st.integers(2, 500), st.data())
def test_evenly_spaced_indexes_have_both_ends(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, total))
    chosen = evenly(total, count)
    assert chosen[0] == 0 and chosen[-1] == total - 1
    assert len(chosen) == count and chosen == sorted(set(chosen))


def index_of(lines: list[tuple[int, int, int]]) -> ReplyIndex:
    """An index of replies of (step, group, bytes), without a file."""
    index = ReplyIndex(Path("nowhere"))
    for step, group, length in lines:
        index._add(0, length, {"step": step, "group": group, "row": f"r{group}"})
    index._store()
    return index


def columns(index: ReplyIndex) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = index.chunk(wanted=range(len(index)))["columns"]
    return found


lines = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(1, 500)), min_size=1, max_size=200)


@given(lines, st.integers(4_000, 60_000))
def test_chosen_replies_fit_and_keep_first_and_last_step(rows: list[tuple[int, int, int]], budget: int) -> None:
    index = index_of(rows)
    chosen = index.choose(budget)
    assert sum(rows[at][2] for at in chosen) <= budget and len(set(chosen)) == len(chosen)
    steps = [rows[at][0] for at in chosen]
    assert steps == sorted(steps), "a step's replies stand together, in order"
    assert {min(steps), max(steps)} == {min(row[0] for row in rows), max(row[0] for row in rows)}
    if sum(row[2] for row in rows) <= budget:
        assert sorted(chosen) == list(range(len(rows)))


def test_a_crowded_step_keeps_whole_groups() -> None:
    index = index_of([(step, number // 4, 100) for step in (1, 2) for number in range(40)])
    chosen = index.choose(2_000)
    assert [sum(columns(index)["step"][at] == step for at in chosen) for step in (1, 2)] == [8, 8]


def write(path: Path, rows: list[dict[str, Any]]) -> ReplyIndex:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = ReplyIndex(path)
    index.follow()
    return index


def test_missing_scores_are_counted_by_reason_in_the_whole_file(tmp_path: Path) -> None:
    futures = [
        {"missing": None, "scores": {"accuracy": {"value": 1.0}, "bleu": {"missing": "judge: timeout"}}},
        {"missing": "user: budget", "scores": {}},
        {"missing": None, "scores": {"accuracy": {"value": float("nan")}}},
    ]
    row = {"step": 1, "group": 0, "futures": futures, "reward": {"total": {"missing": "bleu: no future"}}}
    found = write(tmp_path / "rollouts.jsonl", [row] * 3)
    assert (len(found), found.futures()) == (3, 9)
    assert set(found.missing()) == {
        ("score: bleu", "judge: timeout", 3, 3),
        ("future", "user: budget", 3, 9),
        ("score: accuracy", "no value and no reason in the log", 3, 6),
        ("reward of a reply", "bleu: no future", 3, 3),
    }
    told = [found.chunk()["strings"][number] for number in columns(found)["missing"][0]]
    assert told[0] == "bleu: no future" and len(told) == 4, "the reward's own reason first"


def test_a_zero_is_a_value() -> None:
    assert missing_reason({"value": 0.0}) is None
    assert missing_reason(0) is None
    assert missing_reason({"missing": "why"}) == "why"
    assert missing_reason(None) is not None


def test_odd_rows_do_not_break_the_index(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {},
        {"futures": None, "reward": 3},
        {"messages": "?", "futures": [None, 1], "groups": 7, "credit": "no"},
        {"step": None, "messages": [{}], "reward": {"total": 1, "means": [], "terms": None}},
    ]
    found = write(tmp_path / "rollouts.jsonl", rows)
    assert len(found) == 4 and columns(found)["reward"] == [None, None, None, 1]


def test_texts_that_cannot_be_encoded_do_not_break_the_index(tmp_path: Path) -> None:
    odd = "lone \ud800 and \x00"
    scores = {odd: {"value": 1.0}, "b": {"missing": odd}}
    row = {"step": 1, "key": odd, "row": odd, "groups": {odd: odd}, "futures": [{"scores": scores, "missing": odd}]}
    found = write(tmp_path / "rollouts.jsonl", [row | {"reward": {"total": {"missing": odd}, "means": scores}}] * 2)
    told = "lone ? and \x00"
    assert {reason for _, reason, _, _ in found.missing()} == {told} and f"score/{told}" in found.scales
    assert found.chunk()["columns"]["key"] == [told, told] and told in found.chunk()["strings"]


def reply(step: int, said: str, value: float = 0.5, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": said}
    return {"step": step, "row": f"r{step}", "key": f"r{step}#0", "messages": [message], **more} | {
        "reward": {"total": {"value": value}, "means": {"bleu": {"value": value / 2}}, "terms": {}, "parts": {}}
    }


def test_an_index_grows_with_its_log_and_new_columns_begin_empty(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    index = write(path, [reply(1, "one", 0.25)])
    with path.open("a") as file:
        file.write(json.dumps(reply(2, "two", -1.0, groups={"opening": "vague"})) + "\n" + '{"step": 3, "mess')
    assert index.follow() and not index.follow()
    whole = index.chunk()
    assert whole["columns"]["step"] == [1, 2] and whole["means"] == {"bleu": [0.125, -0.5]}
    assert whole["slices"]["opening"][0] is None and whole["strings"][whole["slices"]["opening"][1]] == "vague"
    assert index.scales["total"] == [-1.0, 0.25]
    assert index.read(1)["messages"][0]["content"] == "two"
    chunk = index.chunk(1, strings=2)
    assert chunk["columns"]["step"] == [2] and chunk["strings"] == whole["strings"][2:]


def test_a_rewound_log_starts_a_new_generation(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    index = write(path, [reply(1, "one"), reply(2, "two")])
    path.write_text(json.dumps(reply(1, "one")) + "\n")
    assert index.follow() and (index.generation, len(index)) == (1, 1)


@pytest.mark.parametrize("ascii", [True, False])
def test_search_finds_what_was_said_and_not_the_logs_own_keys(tmp_path: Path, ascii: bool) -> None:
    path = tmp_path / "rollouts.jsonl"
    future = {"messages": [{"role": "user", "content": "später", "note": {"thought": "a Hidden wish"}}]}
    rows = [reply(1, 'Say "HELLO"\nnow'), reply(2, "Grüße", futures=[future])]
    path.write_text("".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows))
    index = ReplyIndex(path)
    index.follow()
    assert index.find('"hello"\nNOW') == [0] and index.find("GRÜSSE") == []
    assert index.find("grüße") == [1] and index.find("SPÄTER") == [1] and index.find("hidden wish") == [1]
    assert index.find("messages") == [] and index.find("r2#0") == [1]


def everything(index: ReplyIndex) -> dict[str, Any]:
    """All that an index holds."""
    tables = ("read_to", "replies", "strings", "counts order by what, reason", "scales order by name")
    return {table: index.database.execute(f"select * from {table}").fetchall() for table in tables}


def read_index(path: Path) -> ReplyIndex:
    index = ReplyIndex(path)
    index.follow()
    return index


@pytest.fixture
def long_run(tmp_path: Path) -> RunFolder:
    """Five steps of different replies, as a run writes them."""
    folder, rng = RunFolder(tmp_path / "run"), random.Random(0)
    folder.path.mkdir()
    for step in range(1, 6):
        make = classmate_reply if step % 2 else talk_reply
        folder.append_rollouts([make(rng, step, group, n, 0.5) for group in range(2) for n in range(2 + step % 3)])
    folder.write_index()
    return folder


def test_the_index_a_run_writes_equals_one_read_from_its_log(long_run: RunFolder) -> None:
    log = long_run.path / "rollouts.jsonl"
    quick = ReplyIndex(log)
    quick.follow(0.0)
    assert len(quick) == len(log.read_text().splitlines()), "all replies are there at once"
    (long_run.path / INDEX).unlink()
    assert everything(quick) == everything(read_index(log))


def test_steps_that_the_index_lacks_are_read(long_run: RunFolder) -> None:
    log = long_run.path / "rollouts.jsonl"
    kept = (long_run.path / INDEX).read_bytes()
    long_run.append_rollouts([talk_reply(random.Random(3), 6, 0, n, 0.5) for n in range(3)])
    (long_run.path / INDEX).write_bytes(kept)  # as if the run had been killed between writing the two files
    found = everything(read_index(log))
    (long_run.path / INDEX).unlink()
    assert found == everything(read_index(log))


@pytest.mark.parametrize("harm", ["cut", "no database", "another database", "a folder"])
def test_an_unreadable_index_is_ignored_and_rebuilt(long_run: RunFolder, harm: str) -> None:
    log, file = long_run.path / "rollouts.jsonl", long_run.path / INDEX
    expected = everything(read_index(log))
    content = file.read_bytes()
    file.unlink()
    if harm == "a folder":
        file.mkdir()
    elif harm == "another database":
        with closing(sqlite3.connect(file)) as other, other:
            other.execute("create table replies (x)")
    else:
        file.write_bytes(content[: len(content) // 2] if harm == "cut" else b"not a database" * 100)
    assert everything(read_index(log)) == expected
    rows = [talk_reply(random.Random(4), 6, 0, n, 0.5) for n in range(2)]
    long_run.append_rollouts(rows)
    long_run.write_index()
    again = ReplyIndex(log)
    again.follow(0.0)
    assert len(again) == (1 if harm == "a folder" else len(expected["replies"]) + 2), "a run never ends by it"


def test_an_index_of_another_log_is_ignored(long_run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    rng = random.Random(1)
    other.append_rollouts([talk_reply(rng, 7, 0, n, 0.5) for n in range(30)])
    shutil.copy(long_run.path / INDEX, other.path / INDEX)
    assert columns(read_index(other.path / "rollouts.jsonl"))["step"] == [7] * 30


def test_a_rewound_and_continued_run_is_indexed_in_its_current_state(long_run: RunFolder) -> None:
    log = long_run.path / "rollouts.jsonl"
    watching = read_index(log)
    long_run.rewind(["rl"], "rl", 2)
    rng = random.Random(2)
    long_run.append_rollouts([talk_reply(rng, 3, 0, n, 0.5) for n in range(3)])
    long_run.write_index()
    assert watching.follow() and watching.generation == 1
    found = everything(watching)
    (long_run.path / INDEX).unlink()
    assert found == everything(read_index(log)) and {step for _, _, _, step, _ in found["replies"]} == {1, 2, 3}


def test_a_log_followed_in_slices_is_served_from_its_index_alone(
    long_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = everything(read_index(long_run.path / "rollouts.jsonl"))
    monkeypatch.setattr(ReplyIndex, "_add", None)  # no reply is read
    index = ReplyIndex(long_run.path / "rollouts.jsonl")
    while index.follow(0):
        pass
    assert everything(index) == expected
