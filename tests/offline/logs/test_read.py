"""`upshot logs look`: every format is read, every bad record is counted with its place, and the rest continues."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.cli import main
from upshot.core.errors import UserError
from upshot.offline.logs import read
from upshot.offline.logs.mask import is_card, mask
from upshot.offline.logs.read import LoggedConversation, LogReader

ASKED, TOLD = {"role": "user", "content": "where is my parcel"}, {"role": "assistant", "content": "on its way"}
TALK = {"messages": [ASKED, TOLD]}


def reading(path: Path, text: str | bytes, **fields: Any) -> tuple[list[LoggedConversation], LogReader]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    reader = LogReader([str(path)], fields)
    return list(reader), reader


def said(talk: LoggedConversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in talk.messages]


PLAIN = [("user", "where is my parcel"), ("assistant", "on its way")]
FORMATS = {
    "openai": TALK,
    "sharegpt": {"conversations": [{"from": "human", "value": PLAIN[0][1]}, {"from": "gpt", "value": PLAIN[1][1]}]},
    "schema-guided": {
        "turns": [{"speaker": "USER", "utterance": PLAIN[0][1]}, {"speaker": "SYSTEM", "utterance": PLAIN[1][1]}]
    },
    "taskmaster": {
        "utterances": [{"speaker": "user", "text": PLAIN[0][1]}, {"speaker": "assistant", "text": PLAIN[1][1]}]
    },
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": PLAIN[0][1]}]}, TOLD]},
    "strings": {"messages": [{"role": "user", "content": [PLAIN[0][1]]}, TOLD]},
    "bare list": [ASKED, TOLD],
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_every_format_gives_the_same_conversation(name: str, ending: str, tmp_path: Path) -> None:
    (talk,), reader = reading(tmp_path / f"logs.{ending}", json.dumps(FORMATS[name]))
    assert said(talk) == PLAIN and not reader.account()


def test_formats_may_be_mixed_in_a_file_and_files_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, FORMATS.values())))
    (tmp_path / "b.json").write_text(
        json.dumps({"version": 1, "data": [FORMATS["openai"], FORMATS["taskmaster"]]}, indent=1)
    )
    (tmp_path / "c.json").write_text(json.dumps([TALK, TALK]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([TALK] * 3), tmp_path / "d.parquet")
    talks = list(LogReader([str(tmp_path)]))
    assert len(talks) == len(FORMATS) + 2 + 2 + 3 and all(said(talk) == PLAIN for talk in talks)
    assert talks[-1].place == "d.parquet, row 3"


BAD = {
    "broken line (not JSON)": '{"messages": [',
    "empty conversation": '{"messages": []}',
    "nobody but the assistant speaks": json.dumps({"messages": [TOLD]}),
    "the assistant says nothing": json.dumps({"messages": [ASKED]}),
    "unknown role 'critic' (map it: --roles critic=user)": json.dumps(
        {"messages": [ASKED, {"role": "critic", "content": "hm"}]}
    ),
    "no messages (expected a list under messages, conversation, conversations …; it has text)": '{"text": "hello"}',
    "'messages' is NoneType, not a list of messages": '{"messages": null}',
    "a message is str, not an object": '{"messages": ["hello"]}',
    "a message has no role (role, from or speaker)": '{"messages": [{"content": "hello"}]}',
}


def test_each_bad_line_is_counted_with_reason_and_place_and_the_rest_is_read(tmp_path: Path) -> None:
    lines = [json.dumps(TALK), *BAD.values(), "", json.dumps(TALK)]
    talks, reader = reading(tmp_path / "logs.jsonl", "\n".join(lines))
    assert len(talks) == 2
    assert reader.unread == Counter(dict.fromkeys(BAD, 1))
    assert [reader.places[reason] for reason in BAD] == [[f"logs.jsonl, line {n}"] for n in range(2, len(BAD) + 2)]


@pytest.mark.parametrize(
    "hostile",
    [
        "[" * 100_000,
        '{"messages": [], "rating": 1' + "0" * 400 + "}",
        json.dumps({"messages": [ASKED, {**TOLD, "tool_calls": ["x", None, 3]}], "rating": 10**400}),
        json.dumps({"messages": [ASKED, {"role": "assistant", "content": "\ud800"}], "customer": "\udfff"}),
    ],
)
def test_a_hostile_line_stops_nothing_and_the_rest_can_be_written(hostile: str, tmp_path: Path) -> None:
    talks, reader = reading(tmp_path / "a.jsonl", f"{json.dumps(TALK)}\n{hostile}\n{json.dumps(TALK)}\n")
    assert said(talks[0]) == said(talks[-1]) == PLAIN and len(talks) + reader.unread.total() == 3
    assert all(f"{message.content}{talk.customer}".encode() for talk in talks for message in talk.messages)


def test_json_nested_too_deeply_ends_only_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a":' * 100_000)
    (tmp_path / "b.jsonl").write_text(json.dumps(TALK))
    reader = LogReader([str(tmp_path)])
    assert [said(talk) for talk in reader] == [PLAIN] and reader.unread.total() == 1


def test_a_named_field_that_no_record_has_is_reported(tmp_path: Path) -> None:
    _, reader = reading(tmp_path / "a.jsonl", json.dumps({**TALK, "rating": 1}), outcome="raiting")
    assert reader.account() == ["note: no conversation has the field 'raiting' (--outcome)"]


def test_files_of_the_same_name_in_several_folders_are_distinct_and_read_once(tmp_path: Path) -> None:
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "log.jsonl").write_text(json.dumps(TALK))
    talks = list(LogReader([str(tmp_path), str(tmp_path / "test" / "log.jsonl")]))
    assert sorted(talk.place for talk in talks) == [
        f"{tmp_path}/{name}/log.jsonl, line 1" for name in ("test", "train")
    ]


def test_a_truncated_list_keeps_its_complete_items(tmp_path: Path) -> None:
    talks, reader = reading(tmp_path / "logs.json", json.dumps([TALK, TALK])[:-20])
    assert len(talks) == 1 and reader.unread["broken JSON: the rest of the file"] == 1


DAMAGED = {"logs.parquet": b"PAR1 no", "logs.jsonl": b"", "logs.json": gzip.compress(b"[]")}


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_or_empty_file_is_one_line_and_the_next_file_is_read(damaged: str, tmp_path: Path) -> None:
    (tmp_path / damaged).write_bytes(DAMAGED[damaged])
    (tmp_path / "whole.jsonl").write_text(json.dumps(TALK))
    reader = LogReader([str(tmp_path)])
    assert len(list(reader)) == 1 and reader.unread.total() == 1


@pytest.mark.parametrize(
    ("encoding", "notes"), [("utf-8-sig", 0), ("utf-16", 0), ("utf-16-le", 0), ("utf-32", 0), ("cp1252", 1)]
)
def test_other_encodings_are_read(encoding: str, notes: int, tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "Größe für café?"}, TOLD]}
    (found,), reader = reading(tmp_path / "logs.jsonl", json.dumps(talk, ensure_ascii=False).encode(encoding))
    assert found.messages[0].content == "Größe für café?"
    assert reader.notes.total() == notes


def test_tool_answers_count_as_observations_and_calls_stay_visible(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
    answer = {"role": "tool", "name": "look", "content": "lost"}
    (talk,), _ = reading(tmp_path / "logs.jsonl", json.dumps({"messages": [ASKED, call, answer, TOLD]}))
    assert [message.name for message in talk.messages] == [None, None, "tool", None]
    assert "look" in talk.messages[1].content and talk.messages[2].content == "[look] lost"


def test_calls_of_older_and_other_services_and_non_text_content_are_kept(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    old = [
        {"role": "assistant", "function_call": {"name": "look"}},
        {"role": "function", "name": "look", "content": "lost"},
    ]
    parts: list[dict[str, Any]] = [
        {"role": "assistant", "content": [{"type": "tool_use", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "lost"}]}]},
    ]
    asked = {"role": "user", "content": [{"type": "text", "text": "see"}, image]}
    lines = [json.dumps({"messages": [asked, *said, TOLD]}) for said in (old, parts)]
    talks, _ = reading(tmp_path / "logs.jsonl", "\n".join(lines))
    for talk in talks:
        assert talk.messages[0].content == "see\n[image_url]"
        assert "<tool_call>" in talk.messages[1].content and '"look"' in talk.messages[1].content
        assert talk.messages[2].name == "tool" and talk.messages[2].content.endswith("] lost")


def test_consecutive_turns_of_one_speaker_are_merged_and_a_greeting_is_noted(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "system", "content": "Be brief."}, TOLD, ASKED, ASKED, TOLD]}
    (found,), reader = reading(tmp_path / "logs.jsonl", json.dumps(talk))
    assert found.system == "Be brief." and len(found.messages) == 2
    assert found.messages[0].content == "where is my parcel\nwhere is my parcel"
    assert reader.notes.total() == 1


OUTCOMES: list[tuple[Any, float | None]] = [
    (True, 1.0), (0, 0.0), (4.5, 4.5), ("5", 5.0), ("thumbs_down", 0.0), ("Solved", 1.0), (None, None),
    ("meh", None), ([1], None),
]  # fmt: skip


def test_outcomes_of_mixed_types_are_numbers_or_missing(tmp_path: Path) -> None:
    lines = [json.dumps({**TALK, "metadata": {"stars": value}}) for value, _ in OUTCOMES]
    talks, reader = reading(tmp_path / "logs.jsonl", "\n".join(lines), outcome="stars")
    assert [talk.outcome for talk in talks] == [expected for _, expected in OUTCOMES]
    assert reader.notes.total() == 2, "missing is not zero, and what cannot be read is told"
    assert any(
        "yes or no in 3 and a number in 3" in line or "a number in 3 and yes or no in 3" in line
        for line in reader.account()
    )


def test_that_outcomes_are_of_several_fields_is_said_with_the_way_out(tmp_path: Path) -> None:
    records = [{"rating": 4, "solved": True}, {"rating": 2}, {"score": 0.5}]
    lines = [json.dumps(TALK | record) for record in records]
    talks, reader = reading(tmp_path / "logs.jsonl", "\n".join(lines))
    assert [talk.outcome for talk in talks] == [4, 2, 0.5]
    assert reader.account() == [
        "note: 1 × 'rating' is taken as the outcome, not 'solved' (--outcome names one) (logs.jsonl, line 1)",
        "note: the outcome is 'rating' in 2 and 'score' in 1 conversations; --outcome names one",
    ]
    assert not reading(tmp_path / "logs.jsonl", lines[0], outcome="solved")[1].account()


def test_free_text_as_outcome_is_one_reason_and_of_many_reasons_some_are_listed(tmp_path: Path) -> None:
    lines = [json.dumps({**TALK, "feedback": f"it was {n}"}) for n in range(50)]
    _, reader = reading(tmp_path / "logs.jsonl", "\n".join(lines))
    (line,) = reader.account()
    assert "50 × outcome is neither a number" in line and "logs.jsonl, line 2: 'it was 1'" in line
    named = [{"messages": [{"role": f"agent {n}", "content": "hi"}]} for n in range(read.REASONS + 10)]
    _, reader = reading(tmp_path / "logs.jsonl", "\n".join(map(json.dumps, named)))
    assert len(reader.account()) == read.REASONS + 1
    assert reader.account()[-1] == "left out: 10 × 10 other reasons"


def test_one_broken_line_of_lines_called_json_loses_no_other(tmp_path: Path) -> None:
    lines = [json.dumps(TALK), "oops {", json.dumps(TALK), json.dumps(TALK)]
    talks, reader = reading(tmp_path / "logs.json", "\n".join(lines))
    assert len(talks) == 3 and reader.account() == ["left out: 1 × broken line (not JSON) (logs.json, line 2)"]
    assert reader.records == 4, "broken lines are records, too: what is left out and what is read add up"


def test_what_is_left_out_of_a_conversation_is_noted(tmp_path: Path) -> None:
    first, second, late = ({"role": "system", "content": text} for text in ("Be brief.", "Be kind.", "An agent joins."))
    empty, call = {"role": "assistant", "content": " "}, {"role": "assistant", "tool_calls": "look()"}
    ((found, *_), reader) = reading(
        tmp_path / "logs.jsonl", json.dumps({"messages": [first, second, ASKED, empty, late, call]})
    )
    assert found.system == "Be brief.\nBe kind." and "look()" in found.messages[1].content
    assert reader.notes == {"message without words left out": 1, "system message after the first turn left out": 1}


def test_messages_may_be_json_text(tmp_path: Path) -> None:
    (talk,), reader = reading(tmp_path / "logs.jsonl", json.dumps({"messages": json.dumps([ASKED, TOLD])}))
    assert said(talk) == PLAIN and not reader.account()


def test_a_time_that_cannot_be_read_is_noted(tmp_path: Path) -> None:
    (talk,), reader = reading(tmp_path / "logs.jsonl", json.dumps({**TALK, "date": "yesterday"}))
    assert talk.time == "yesterday" and "logs.jsonl, line 1: 'yesterday'" in reader.account()[0]


@pytest.mark.parametrize(
    "time",
    ["1767607200", "1767607200000", "1767607200000000", "2026-01-05T10:00:00Z", "2026-01-05 11:00:00+01:00",
     "2026-01-05 10:00", "Mon, 05 Jan 2026 10:00:00 GMT"],
)  # fmt: skip
def test_times_of_all_forms_are_the_same_moment(time: str) -> None:
    assert read.moment_of(time) == 1767607200


@pytest.mark.parametrize("time", ["", "nan", "inf", "01/05/2026", "soon", "1e300"])
def test_what_is_no_time_is_no_moment(time: str) -> None:
    assert read.moment_of(time) is None


def test_fields_are_found_by_usual_names_or_by_path(tmp_path: Path) -> None:
    record = {**TALK, "rating": 3, "meta": {"customer_id": 7, "shop": {"topic": "parcels"}}}
    (talk,), _ = reading(tmp_path / "logs.jsonl", json.dumps(record), kind="shop.topic")
    assert (talk.outcome, talk.customer, talk.kind, talk.time) == (3.0, "7", "parcels", "")


def test_an_endless_line_is_skipped_and_memory_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "LONGEST_LINE", 1 << 16)
    line = json.dumps(TALK) + "\n"
    with (tmp_path / "logs.jsonl").open("w") as file:
        file.write('{"messages": "' + "x" * (1 << 20) + '"}\n')
        file.writelines(line for _ in range(500))
    reader, count = LogReader([str(tmp_path)]), 0
    tracemalloc.start()
    for _ in reader:
        count += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 500 and reader.unread == Counter({"line longer than 0 MB": 1})
    assert peak < 1 << 19, "of a file of more than 1 MB"


def test_a_long_json_list_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "CHUNK", 50)
    talks, reader = reading(tmp_path / "logs.json", json.dumps([TALK] * 40, indent=2))
    assert len(talks) == 40 and not reader.account()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.jsonl"], "no file"),
        (["notes.txt"], "its ending is not one of"),
        (["logs.jsonl", "--roles", "clerk"], "should read NAME=ROLE"),
    ],
)
def test_wrong_command_line_arguments_are_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "logs.jsonl").write_text(json.dumps(TALK))
    assert main(["logs", "look", *words]) == 2
    assert message in capsys.readouterr().err


def test_personal_data_is_masked_and_counted_unless_kept(tmp_path: Path) -> None:
    text = "I am a@b.org, call +44 20 7946 0958 or 415-555-0132; card 4111 1111 1111 1111. "
    text += "Order 12345678, 2024-05-15 15:00"
    counts: Counter[str] = Counter()
    masked = mask(text, counts)
    assert masked == "I am [email], call [phone] or [phone]; card [card]. Order 12345678, 2024-05-15 15:00"
    assert counts == {"email": 1, "phone": 2, "card": 1}
    (tmp_path / "logs.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": text}, TOLD]}))
    kept = list(LogReader([str(tmp_path)], keep_personal=True))
    assert kept[0].messages[0].content == text


@given(st.text(max_size=200))
def test_masking_is_idempotent(text: str) -> None:
    once = mask(text, Counter())
    assert mask(once, Counter()) == once


@given(st.lists(st.integers(0, 9), min_size=12, max_size=18), st.integers(1, 9))
def test_a_card_number_with_a_wrong_check_digit_is_not_masked(digits: list[int], change: int) -> None:
    def with_check(own: list[int]) -> str:
        return next(text for last in "0123456789" if is_card(text := "".join(map(str, own)) + last))

    number = with_check(digits)
    changed = str((int(number[0]) + change) % 10) + number[1:]
    assert is_card(number) and not is_card(changed)


def test_a_missing_file_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"no file 'gone\.jsonl'"):
        LogReader(["gone.jsonl"])
