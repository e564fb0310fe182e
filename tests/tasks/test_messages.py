"""A user's own file where text or messages belong: read, or refused with row and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.run.checks import find
from upshot.tasks.base import tasks
from upshot.tasks.datasets.records import read_dialogues, read_marked_replies, read_preferences, read_replies, row_of

PARTS = [{"type": "text", "text": "how much "}, {"type": "text", "text": "is tea ?"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]


def written(folder: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def talk(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}, {"role": "assistant", "content": "3"}]}


def test_text_parts_of_a_message_are_joined(tmp_path: Path) -> None:
    (dialogue,) = read_dialogues(written(tmp_path, talk(PARTS)))
    assert dialogue[0] == Message("user", "how much is tea ?")
    assert Message.from_dict({"role": "user", "content": PARTS}).content == "how much is tea ?"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (talk(IMAGE), "row 2, 'messages'.content.0 is a part of type 'image_url'; only"),
        (talk(3), "row 2, 'messages'.content is int; give text"),
        (talk(None), "row 2, 'messages': a message of role 'user' has no content"),
        (talk("hi", "human"), "row 2, 'messages': unknown role 'human'; the roles are system, user, assistant, tool"),
        (talk("a \ud800"), r"row 2, 'messages': \\ud800 is half of a character"),
        ({"messages": 3}, "row 2, 'messages': expected text or messages, found 3"),
        ({"prompt": "hi", "completion": None}, "row 2, 'completion': expected text or messages, found null"),
        ({"prompt": float("nan"), "completion": "a"}, "row 2, 'prompt': expected text or messages, found nan"),
        ({"prompt": "hi", "completion": 3}, "row 2, 'completion': expected text or messages, found 3"),
    ],
)
def test_a_value_that_is_not_text_is_refused_with_file_row_and_column(
    row: dict[str, Any], says: str, tmp_path: Path
) -> None:
    file = written(tmp_path, talk("hi"), row)
    with pytest.raises(UserError, match=rf"train.data '{file}', {says}"):
        read_dialogues(file)


@pytest.mark.parametrize("value", [None, float("nan"), 3])
def test_empty_cells_of_pairs_and_marked_replies_are_refused(value: Any, tmp_path: Path) -> None:
    for name in ("prompt", "chosen", "rejected"):
        row = {"prompt": "hi", "chosen": "a", "rejected": "b", name: value}
        with pytest.raises(UserError, match=f"row 1, '{name}': expected text or messages, found"):
            read_preferences(written(tmp_path, row), 0.0)
    with pytest.raises(UserError, match=r"row 1.*'completion'.*(null|nan|3)"):
        read_marked_replies(written(tmp_path, {"prompt": "hi", "completion": value, "label": True}))


def test_an_empty_column_is_not_reported_as_absent(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="row 1, 'chosen': expected text or messages, found null") as raised:
        read_preferences(written(tmp_path, {"prompt": "hi", "chosen": None, "rejected": "b"}), 0.0)
    assert "it has" not in str(raised.value)
    with pytest.raises(UserError, match=r"row 1 has neither 'prompt' and 'completion' nor 'messages'; it has prompt$"):
        read_replies([{"prompt": "hi", "completion": None}])
    with pytest.raises(UserError, match=r"a row with the columns answer has no prompt"):
        row_of({"prompt": None, "answer": "4"}, "exact-match")


def test_a_reply_that_is_a_number_is_not_an_empty_one() -> None:
    with pytest.raises(UserError, match=r"row 1: expected a reply \(text or a message\), found 3"):
        read_replies([{"prompt": "hi", "completion": 3}])


def test_scores_that_are_not_numbers_are_refused_and_those_of_csv_are_read(tmp_path: Path) -> None:
    row = {"prompt": "hi", "chosen": "a", "rejected": "b", "score_chosen": "high", "score_rejected": "0.5"}
    with pytest.raises(UserError, match="row 1, 'score_chosen': expected a number, found high"):
        read_preferences(written(tmp_path, row), 0.1)
    for empty in (None, float("nan")):
        with pytest.raises(UserError, match="row 1, 'score_chosen': expected a number, found n"):
            read_preferences(written(tmp_path, {**row, "score_chosen": empty}), 0.1)
    assert len(read_preferences(written(tmp_path, {**row, "score_chosen": "0.9"}), 0.1)) == 1


def test_labels_of_csv_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,completion,label\nhi,a,True\nhi,b,0\n")
    assert [one.good for one in read_marked_replies(str(tmp_path / "rows.csv"))] == [True, False]


def test_messages_as_json_text_in_a_csv_cell_are_read(tmp_path: Path) -> None:
    cell = json.dumps(talk("hi")["messages"]).replace('"', '""')
    (tmp_path / "rows.csv").write_text(f'messages\n"{cell}"\n')
    assert [message.role for message in read_dialogues(str(tmp_path / "rows.csv"))[0]] == ["user", "assistant"]


def test_a_csv_row_with_more_cells_than_the_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,completion\nhi,a,b\n")
    with pytest.raises(UserError, match="row 1 has more cells than the header"):
        read_dialogues(str(tmp_path / "rows.csv"))


def test_a_folder_is_not_reported_as_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; name one file"):
        read_dialogues(str(tmp_path))


def test_a_prompt_that_is_a_number_is_refused() -> None:
    with pytest.raises(UserError, match="'prompt': expected text or messages, found 3"):
        row_of({"prompt": 3, "answer": "4"}, "exact-match")


def test_a_question_that_is_no_text_is_named() -> None:
    with pytest.raises(UserError, match=r"'question': expected text, found \['how much \?'\] \(list\)"):
        row_of({"question": ["how much ?"], "answer": "4"}, "exact-match")


@pytest.mark.parametrize(("answer", "reference"), [(4, 4), (4.0, 4), (4.5, 4.5), ("4", "4")])
def test_a_numeric_answer_is_read_as_the_text_of_a_reply(answer: Any, reference: Any) -> None:
    assert repr(row_of({"question": "2 + 2", "answer": answer}, "exact-match").reference) == repr(reference)


def asked(folder: Path, column: str, answer: Any) -> str:
    return written(folder, *({"question": f"how much is {n} ?", column: answer} for n in range(6)))


def test_a_misspelt_answer_column_is_named_before_the_run(tmp_path: Path) -> None:
    from tests.training.workshop import recipe

    for column, answer, says in (
        ("anwser", "3", "the columns are question, anwser; did you mean 'answer' by 'anwser'?"),
        ("answer", "", "'answer' is empty in all of them"),
    ):
        options = {"name": "exact-match", "file": asked(tmp_path, column, answer)}
        verified = {"metrics": [{"name": "verifier"}]}
        found = find(recipe(tmp_path / "run", more={"task": options, "reward": verified}), offline=True)
        assert any("task 'exact-match', train: no row has an answer" in one.says and says in one.says for one in found)


def test_rows_without_a_reference_are_fine_for_verifiers_that_need_none(tmp_path: Path) -> None:
    row = {"prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    task: Any = tasks.create("constraints", {"train_file": written(tmp_path, row)})
    assert task.rows("train") and not task.unanswered


def test_a_row_of_a_conversation_task_is_named_by_its_number(tmp_path: Path) -> None:
    good, odd = ([{"role": role, "content": "hi"}] for role in ("user", "human"))
    rows = [{"prompt": prompt, "single_turn_prompt": "tea", "completion": "x"} for prompt in (good, odd)]
    with pytest.raises(UserError, match=r"task 'collabllm', train, row 2: unknown role 'human'"):
        tasks.create("collabllm", {"train_file": written(tmp_path, *rows)}).rows("train")
    talks: Any = tasks.create("collabllm", {"train_file": written(tmp_path, talk("hi"), talk("hi", "human"))})
    with pytest.raises(UserError, match=r"task 'collabllm', train, row 2: unknown role 'human'"):
        talks.dialogues("train")
