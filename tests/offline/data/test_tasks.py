"""The CollabLLM tasks read the four single-turn sets, prepared parquet and files of any other name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from upshot.core.errors import UserError
from upshot.offline.data.prepare import PrepareSettings, prepare
from upshot.tasks.base import tasks
from upshot.tasks.datasets.splits import goal_key

SAMPLES = Path(__file__).parent / "samples"


def test_math_keeps_level_five_only_and_the_user_opens() -> None:
    task = tasks.create("math-hard", {"train_file": str(SAMPLES / "math.jsonl")})
    rows = task.rows("train")
    assert len(rows) == 4 and all(row.meta["level"] == "Level 5" for row in rows)
    assert rows[0].messages == () and rows[0].goal and "boxed" in rows[0].reference
    assert rows[0].meta["task_desc"]


def test_medium_hides_the_article_and_skips_empty_ones() -> None:
    rows = tasks.create("medium", {"train_file": str(SAMPLES / "medium.jsonl")}).rows("train")
    assert len(rows) == 2
    assert rows[0].reference in rows[0].goal and rows[0].meta["title"] == "Why my bread failed"


def test_bigcodebench_carries_the_unit_tests() -> None:
    rows = tasks.create("bigcodebench", {"train_file": str(SAMPLES / "bigcodebench.jsonl")}).rows("train")
    assert len(rows) == 3 and "unittest" in rows[0].meta["test"] and rows[0].meta["entry_point"] == "task_func"
    assert rows[0].reference.startswith("def task_func")


def test_abg_coqa_opens_with_story_and_question_and_marks_ambiguous_ones() -> None:
    task = tasks.create("abg-coqa", {"file": str(SAMPLES / "coqa_abg_test.json")})
    rows = task.rows("test")
    assert [task.groups(row)["question"] for row in rows] == ["ambiguous", "unambiguous"]
    assert rows[0].messages[-1].content.endswith("\n\nMy question: What does he play?")
    assert "answer" not in rows[0].messages[-1].content, "whether to answer or to ask back is the policy's choice"
    assert "How many brothers" in rows[0].messages[-1].content
    assert rows[0].goal and rows[0].messages[-1].role == "user"


def test_a_file_without_splits_is_split_by_goal() -> None:
    task = tasks.create("math-hard", {"file": str(SAMPLES / "math.jsonl"), "held_out": 0.25})
    by_split = {split: {goal_key(row) for row in task.rows(split)} for split in ("train", "validation", "test")}
    assert {split: len(goals) for split, goals in by_split.items()} == {"train": 2, "validation": 1, "test": 1}
    assert len(set().union(*by_split.values())) == 4


def test_the_same_goal_in_two_files_stays_out_of_train(tmp_path: Path) -> None:
    lines = (SAMPLES / "math.jsonl").read_text().splitlines()
    (tmp_path / "test.jsonl").write_text(lines[0])
    options = {"train_file": str(SAMPLES / "math.jsonl"), "test_file": str(tmp_path / "test.jsonl")}
    task = tasks.create("math-hard", options)
    assert len(task.rows("train")) == 3 and len(task.rows("test")) == 1


def test_prepared_rl_parquet_is_read_back_with_goal_reference_and_facts(tmp_path: Path) -> None:
    prepare(str(SAMPLES / "multiturn-math-hard.jsonl"), tmp_path, PrepareSettings("rl", task_desc="maths"))
    task = tasks.create(
        "math-hard",
        {
            "train_file": str(tmp_path / "rl_train.parquet"),
            "validation_file": str(tmp_path / "rl_validation.parquet"),
        },
    )
    rows = task.rows("train")
    assert len(rows) == 6 and len({row.id for row in rows}) == 6
    assert rows[0].messages[-1].role == "user" and "tulips" in "".join(str(row.goal) for row in rows)
    assert rows[0].meta["level"] == "Level 5" and rows[0].meta["task_desc"] == "maths"
    assert not {goal_key(r) for r in rows} & {goal_key(r) for r in task.rows("validation")}


def test_a_published_multi_turn_set_gives_each_history_once() -> None:
    task = tasks.create("collabllm", {"train_file": str(SAMPLES / "multiturn-math-hard.jsonl")})
    assert len(task.rows("train")) == 8


def test_sft_parquet_gives_dialogues(tmp_path: Path) -> None:
    prepare(str(SAMPLES / "multiturn-math-hard.jsonl"), tmp_path, PrepareSettings("sft"))
    task = tasks.create("math-hard", {"train_file": str(tmp_path / "sft_train.parquet")})
    dialogues = task.dialogues("train")
    assert len(dialogues) == 3 and dialogues[0][-1].role == "assistant"


def test_a_split_without_rows_is_an_error_that_lists_the_splits() -> None:
    task = tasks.create("math-hard", {"train_file": str(SAMPLES / "math.jsonl")})
    with pytest.raises(UserError, match=r"no rows in split 'test' \(rows: train 4\)"):
        task.rows("test")


def test_the_task_for_users_files_needs_a_file() -> None:
    with pytest.raises(UserError, match="needs the option 'file'"):
        tasks.create("collabllm")


def test_facts_beside_goal_and_reference_reach_the_row(tmp_path: Path) -> None:
    file = tmp_path / "goals.jsonl"
    file.write_text(json.dumps({"goal": "Say 7", "reference": "7", "script": ["hello", "seven please"]}))
    (row,) = tasks.create("collabllm", {"train_file": str(file), "system": "plain"}).rows("train")
    assert row.meta["script"] == ["hello", "seven please"] and row.messages[0].role == "system"


def test_a_tiny_model_gets_the_words_of_the_data_only_if_asked() -> None:
    file = str(SAMPLES / "multiturn-math-hard.jsonl")
    words = tasks.create("math-hard", {"train_file": file, "tiny_words": 30}).vocabulary()
    assert len(words) == len(set(words)) == 30 and "you" in words
    assert not tasks.create("math-hard", {"train_file": file}).vocabulary()


def test_in_a_folder_with_sft_rl_and_dpo_parquet_goals_come_from_the_rl_rows(tmp_path: Path) -> None:
    for purpose in ("sft", "rl", "dpo"):
        prepare(str(SAMPLES / "multiturn-math-hard.jsonl"), tmp_path, PrepareSettings(purpose, min_gap=0.0))
    task = tasks.create("math-hard", {"file": str(tmp_path)})
    assert len(task.rows("train")) == 6 and len(task.rows("validation")) == 2
    assert len(task.dialogues("train")) == 3
