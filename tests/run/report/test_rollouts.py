"""What is counted is everything; what is kept fits, and is not chosen by reward."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from upshot.run.report.rollouts import MAX_TEXT, RolloutLine, TextTable, choose, evenly, missing_reason, pack, survey


@given(st.integers(2, 500), st.data())
def test_evenly_spaced_indexes_have_both_ends(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, total))
    chosen = evenly(total, count)
    assert chosen[0] == 0 and chosen[-1] == total - 1
    assert len(chosen) == count and chosen == sorted(set(chosen))


steps = st.dictionaries(
    st.integers(0, 1000).map(float),
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5)), min_size=1, max_size=20).map(
        lambda lines: [RolloutLine(index, cost, cost, group) for index, (cost, group) in enumerate(lines)]
    ),
    min_size=1,
    max_size=40,
)


@given(steps, st.integers(4_000, 60_000))
def test_chosen_replies_fit_and_keep_first_and_last_step(lines: dict[float, list[RolloutLine]], budget: int) -> None:
    chosen = choose(lines, budget)
    assert sum(line.cost for step in chosen.values() for line in step) <= budget
    assert min(chosen) == min(lines) and max(chosen) == max(lines)
    for step, kept in chosen.items():
        assert set(kept) <= set(lines[step])
    if sum(line.cost for step in lines.values() for line in step) <= budget:
        assert chosen == {step: lines[step] for step in sorted(lines)}


def test_a_crowded_step_keeps_whole_groups() -> None:
    lines = [RolloutLine(index, 100, 100, index // 4) for index in range(40)]
    kept = choose({1.0: lines, 2.0: lines}, 2_000)
    assert {step: len(chosen) for step, chosen in kept.items()} == {1.0: 8, 2.0: 8}


def test_missing_scores_are_counted_by_reason_in_the_whole_file(tmp_path: Path) -> None:
    futures = [
        {"missing": None, "scores": {"accuracy": {"value": 1.0}, "bleu": {"missing": "judge: timeout"}}},
        {"missing": "user: budget", "scores": {}},
        {"missing": None, "scores": {"accuracy": {"value": float("nan")}}},
    ]
    row = {"step": 1, "group": 0, "futures": futures, "reward": {"total": {"missing": "bleu: no future"}}}
    path = tmp_path / "rollouts.jsonl"
    path.write_text((json.dumps(row) + "\n") * 3)
    found = survey(path)
    assert (found.replies, found.futures) == (3, 9)
    assert dict(found.missing) == {
        ("score: bleu", "judge: timeout"): 3,
        ("future", "user: budget"): 3,
        ("score: accuracy", "no value and no reason in the log"): 3,
        ("reward of a reply", "bleu: no future"): 3,
    }
    assert found.scored["score: accuracy"] == 6 and found.scored["future"] == 9


def test_a_zero_is_a_value() -> None:
    assert missing_reason({"value": 0.0}) is None
    assert missing_reason(0) is None
    assert missing_reason({"missing": "why"}) == "why"
    assert missing_reason(None) is not None


def test_repeated_texts_are_stored_once_and_long_ones_cut() -> None:
    texts = TextTable()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * (MAX_TEXT + 5)}]
    first = pack({"messages": messages, "futures": [{"messages": [{"role": "user", "content": "hi"}]}]}, texts)
    assert first["messages"][0]["text"] == first["futures"][0]["messages"][0]["text"] == 0
    assert len(texts.all) == 2 and texts.cut == 1
    assert "5 more characters are left out" in texts.all[1]


def test_texts_of_credited_spans_are_stored_with_the_others() -> None:
    texts = TextTable()
    credit = [{"start": 0, "stop": 1, "text": "hi"}, {"start": 1, "stop": 2}]
    packed = pack({"messages": [{"role": "user", "content": "hi"}], "credit": credit}, texts)
    assert packed["credit"] == [{"start": 0, "stop": 1, "text": 0}, {"start": 1, "stop": 2}] and texts.all == ["hi"]


def test_odd_rows_do_not_break_the_survey(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    rows = [
        {},
        {"futures": None, "reward": 3},
        {"messages": "?", "futures": [None, 1]},
        {"step": None, "messages": [{}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert survey(path).replies == 4
