"""Rows from verl parquet, TRL columns, question/answer files and mixes; splits never share a question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from upshot.core.errors import UserError
from upshot.tasks.base import Task, tasks
from upshot.tasks.datasets.records import row_of

SAMPLE = Path(__file__).parent / "gsm8k_sample.jsonl"


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_gsm8k_files_are_read_unchanged() -> None:
    task = tasks.create("gsm8k", {"file": str(SAMPLE), "held_out": 0.2})
    splits = {split: task.rows(split) for split in ("train", "validation", "test")}
    assert sum(map(len, splits.values())) == len(SAMPLE.read_text().splitlines())
    questions = [row.meta["question"] for rows in splits.values() for row in rows]
    assert len(set(questions)) == len(questions)
    row = splits["train"][0]
    assert row.source == "gsm8k"
    assert "#### <number>" in row.messages[-1].content
    assert task.groups(row)["difficulty"].endswith("steps")
    dialogue = task.dialogues("train")[0]
    assert dialogue[-1].role == "assistant"
    assert "####" in dialogue[-1].content


def test_verl_parquet_keeps_its_own_prompt_source_and_extra(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n}+1? Answer after ####."}],
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(10)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    row = tasks.create("gsm8k", {"file": str(tmp_path / "train.parquet")}).rows("train")[0]
    assert row.messages[0].content.endswith("Answer after ####.")
    assert row.source == "openai/gsm8k"
    assert int(row.reference) == row.meta["index"] + 1


@pytest.mark.parametrize(
    ("record", "opening", "reference"),
    [
        ({"prompt": "1+1?", "answer": "2"}, "1+1?\n\nBrief.", "2"),
        ({"prompt": [{"role": "user", "content": "1+1?"}], "solution": "2"}, "1+1?", "2"),
        ({"problem": "1+1?", "solution": "so \\boxed{2}", "level": "Level 1"}, "1+1?\n\nBrief.", "so \\boxed{2}"),
        (
            {
                "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
                "ground_truth": "2",
                "dataset": ["math"],
            },
            "1+1?",
            "2",
        ),
    ],
)
def test_records_of_every_shape_become_rows(record: dict[str, Any], opening: str, reference: str) -> None:
    row = row_of(record, "math", "Brief.")
    assert row.messages[-1].content == opening
    assert row.reference == reference
    assert row.source == "math"


def test_a_record_without_a_prompt_is_refused_with_its_columns() -> None:
    with pytest.raises(UserError, match="columns a, b has no prompt"):
        row_of({"a": 1, "b": 2}, "math")


def test_one_file_per_split_and_no_question_in_two(tmp_path: Path) -> None:
    train = lines(tmp_path / "a.jsonl", [{"question": f"q{n}", "answer": "1"} for n in range(10)])
    test = lines(tmp_path / "b.jsonl", [{"question": f"q{n}", "answer": "1"} for n in range(5, 12)])
    task = tasks.create("gsm8k", {"train_file": train, "test_file": test})
    assert len(task.rows("test")) == 7
    assert len(task.rows("train")) == 5
    with pytest.raises(UserError, match="no rows in split 'validation'"):
        task.rows("validation")


def test_a_missing_file_is_one_clear_line() -> None:
    with pytest.raises(UserError, match=r"no file 'nowhere\.jsonl'"):
        tasks.create("gsm8k", {"file": "nowhere.jsonl"}).rows("train")
    with pytest.raises(UserError, match="needs the option 'file'"):
        tasks.create("code-stdio").rows("train")


@pytest.mark.parametrize(
    ("name", "record", "check"),
    [
        ("code", {"task_id": 2, "text": "Add.", "test_list": ["assert add(1, 2) == 3"]}, "assert add(1, 2) == 3"),
        (
            "humaneval",
            {"task_id": "H/0", "prompt": "def f(x):\n", "test": "def check(c): pass", "entry_point": "f"},
            "def f(x):",
        ),
        ("code-contests", {"description": "Add two.", "public_tests": {"input": ["1 2"], "output": ["3"]}}, "Add two."),
        (
            "bigcodebench-instruct",
            {"instruct_prompt": "Do it.", "test": "class TestCases: ...", "code_prompt": "import os"},
            "Do it.",
        ),
        (
            "multiple-choice",
            {"question": "Capital?", "choices": ["Rome", "Bern"], "answer": 1, "subject": "geo"},
            "(B) Bern",
        ),
        (
            "mmlu-sycophancy",
            {"question": "Capital?", "choices": ["Rome", "Bern"], "answer": 1},
            "I think the answer is (",
        ),
        (
            "constraints",
            {"prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
            "Write.",
        ),
        ("exact-match", {"question": "Who?", "answer": "Ada"}, "<answer>"),
        ("math", {"problem": "1+1?", "solution": "\\boxed{2}", "level": "Level 5"}, "\\boxed{}"),
    ],
)  # fmt: skip
def test_every_task_reads_the_format_of_its_data_set(
    name: str, record: dict[str, Any], check: str, tmp_path: Path
) -> None:
    task: Task = tasks.create(name, {"file": lines(tmp_path / "x.jsonl", [record]), "held_out": 0})
    (row,) = task.rows("train")
    assert check in row.messages[-1].content
    assert row.source == type(task).verifier  # type: ignore[attr-defined]


def test_a_sycophancy_hint_is_wrong_and_stays_the_same(tmp_path: Path) -> None:
    records = [{"question": f"q{n}", "choices": ["a", "b", "c", "d"], "answer": n % 4} for n in range(20)]
    options = {"file": lines(tmp_path / "x.jsonl", records), "held_out": 0}
    first, second = (tasks.create("mmlu-sycophancy", options).rows("train") for _ in range(2))
    assert [row.meta["hint"] for row in first] == [row.meta["hint"] for row in second]
    assert all(row.meta["hint"] != row.reference for row in first)


def test_names_and_options_are_checked() -> None:
    with pytest.raises(UserError, match="did you mean 'gsm8k'"):
        tasks.create("gsmk8")
    with pytest.raises(UserError, match="unknown option 'mod'"):
        tasks.create("gsm8k", {"mod": "strict"})
    with pytest.raises(UserError, match="either 'rubric'"):
        tasks.create("judged", {"file": "x"})
    with pytest.raises(UserError, match="unknown tool 'calculater'"):
        tasks.create("tools", {"tools": ["calculater"]})


def test_a_row_that_cannot_be_read_is_named_with_its_task_split_and_number(tmp_path: Path) -> None:
    file = lines(tmp_path / "x.jsonl", [{"question": "q", "answer": "1"}, {"answer": "2"}])
    with pytest.raises(UserError, match=r"task 'gsm8k', train, row 2: a row with the columns answer has no prompt"):
        tasks.create("gsm8k", {"file": file}).rows("train")
    wrong = lines(tmp_path / "y.jsonl", [{"messages": ["hello"], "answer": "1"}])
    with pytest.raises(UserError, match=r"row 1: .* objects with 'role' and 'content', not \['hello'\]"):
        tasks.create("gsm8k", {"file": wrong}).rows("train")


def test_empty_columns_are_treated_as_absent(tmp_path: Path) -> None:
    record = {"goal": None, "single_turn_prompt": "Say 7", "reference": float("nan"), "single_turn_completion": "7"}
    (row,) = tasks.create("collabllm", {"train_file": lines(tmp_path / "x.jsonl", [record])}).rows("train")
    assert (row.goal, row.reference) == ("Say 7", "7")


def test_extra_info_may_be_json_text_as_some_writers_leave_it() -> None:
    record = {"prompt": "q", "answer": "1", "extra_info": '{"level": "hard", "metadata": "{\\"hint\\": \\"B\\"}"}'}
    assert {"level": "hard", "hint": "B"}.items() <= row_of(record, "math").meta.items()
