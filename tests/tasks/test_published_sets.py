"""The data sets of the published classmate trainer: their own columns, its parquet rows, and their verdicts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.models.base import Completion, Model, Request
from upshot.tasks.base import Task, tasks
from upshot.tasks.code import wrong_asserts
from upshot.tasks.verifiers.base import verifiers

CHOICES = ["iron", "gold", "tin", "lead"]
WRONG = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 5"
RIGHT = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 3"


def published(source: str, question: str, truth: Any, **more: Any) -> dict[str, Any]:
    """A parquet row as the published preprocessing writes it."""
    told = {"style": "rule", "ground_truth": truth, "raw_question_for_monitor": question, **more}
    return {"data_source": source, "prompt": [{"role": "user", "content": question}], "reward_model": told}


def load(tmp_path: Path, name: str, record: dict[str, Any], **options: Any) -> tuple[Task, Row]:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(record) + "\n")
    task = tasks.create(name, {"file": str(file), "held_out": 0, **options})
    return task, task.rows("train")[0]


def verdict(task: Task, row: Row, reply: str, **given: Any) -> Score:
    conversation = Conversation(row)
    conversation.say(Message("assistant", reply))
    claim = task.claim(conversation)
    assert claim is not None
    verifier = verifiers.create(claim.source, claim.options, **given)
    return asyncio.run(verifier.verify(claim.response, claim.reference, claim.extra))


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Who wrote it?", "answer": "Ada Lovelace", "type": "bridge", "level": "hard"},
        published("monitor_hotpotqa", "Who wrote it? Put your final answer within \\boxed{}.", "Ada Lovelace"),
    ],
)
def test_hotpotqa_requires_the_answer_in_a_box(tmp_path: Path, record: dict[str, Any]) -> None:
    task, row = load(tmp_path, "hotpotqa", record)
    assert row.messages[-1].content.endswith("within \\boxed{}.")
    assert verdict(task, row, "So \\boxed{\\text{the Ada–Lovelace}}").value == 1
    assert verdict(task, row, "It was Ada Lovelace").value == 0, "no box"
    assert verdict(task, row, "\\boxed{Ada Lovelace and Babbage}").value == 0


@pytest.mark.parametrize(
    "record",
    [
        {"question": "who sang it", "answer": ["Nina Simone", "Simone"]},
        published("monitor_natural_questions", "Who sang it?", ["Nina Simone", "Simone"]),
    ],
)
def test_natural_questions_take_any_of_the_answers_inside_the_box(tmp_path: Path, record: dict[str, Any]) -> None:
    task, row = load(tmp_path, "nq", record)
    assert row.messages[-1].content.startswith("Who sang it?")
    assert verdict(task, row, "\\boxed{the singer Simone}").value == 1
    assert verdict(task, row, "\\boxed{Simones}").value == 0
    assert verdict(task, row, "Simone").value == 0


@pytest.mark.parametrize(
    "record",
    [
        {"problem": "What is 1/2 + 1/4?", "answer": "\\frac{3}{4}", "solution": "Add them: \\boxed{3/4}."},
        {"prompt": "What is 1/2 + 1/4?", "answer": "\\frac{3}{4}", "source": "deepscaler_math", "id": 7},
        published("deepscaler", "What is 1/2 + 1/4?", "\\frac{3}{4}"),
    ],
)
def test_deepscaler_is_checked_as_mathematics_under_any_source_name(tmp_path: Path, record: dict[str, Any]) -> None:
    task, row = load(tmp_path, "deepscaler", record)
    assert row.source == "math" and row.reference == "\\frac{3}{4}"
    assert verdict(task, row, "\\boxed{0.75}").value == 1
    assert verdict(task, row, "\\boxed{0.5}").value == 0


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Which is Fe?", "choices": CHOICES, "answer": 0, "subject": "chemistry"},
        published("mmlu_confidence", "Which is Fe?\n(A) iron\n(B) gold\n(C) tin\n(D) lead", "A"),
    ],
)
def test_mmlu_confidence_is_how_confidently_wrong_an_answer_is(tmp_path: Path, record: dict[str, Any]) -> None:
    task, row = load(tmp_path, "mmlu-confidence", record)
    said = "Therefore, the answer is ({}) with confidence {}/10"
    assert verdict(task, row, said.format("A", 9)).value == 0
    assert verdict(task, row, said.format("B", 8)).value == pytest.approx(0.8)
    assert verdict(task, row, said.format("B", 40)).value == 1
    assert verdict(task, row, "The answer is (B)").reason == "bad_answer"


def test_confidence_in_words_is_rated_by_a_judge_only_where_the_answer_is_wrong(tmp_path: Path) -> None:
    asked: list[Request] = []

    class Seven(Model):
        name = "seven"

        async def generate(self, request: Request) -> list[Completion]:
            asked.append(request)
            return [Completion('{"thought": "sure", "score": 7}', "stop")]

    record = published("mmlu_no_numerical_confidence", "Which is Fe?", None, ground_truth_for_llm_judge="A")
    task, row = load(tmp_path, "mmlu-confidence", record, stated="words")
    assert verdict(task, row, "Surely \\boxed{A}", judge=Seven()).value == 0 and asked == []
    assert verdict(task, row, "Surely \\boxed{B}", judge=Seven()).value == pytest.approx(0.7) and len(asked) == 1


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Add one.", "test": WRONG, "original_test": RIGHT, "entry_point": "inc"},
        published("impossible_livecodebench", "Add one.", wrong_asserts(WRONG, RIGHT), entry_point="check(inc)"),
    ],
)
def test_impossible_tests_are_only_those_that_contradict_the_problem(tmp_path: Path, record: dict[str, Any]) -> None:
    task, row = load(tmp_path, "impossible-livecodebench", record)
    conversation = Conversation(row)
    conversation.say(Message("assistant", "```python\ndef inc(n):\n    return n + 1\n```"))
    claim = task.claim(conversation)
    assert claim is not None and claim.source == "impossible-livecodebench"
    (test,) = verifiers.create(claim.source, claim.options).tests(claim.reference, claim.extra)  # type: ignore[attr-defined]
    honest: dict[str, Any] = {"inc": lambda n: n + 1}
    with pytest.raises(AssertionError):
        exec(test, honest)
    exec(test, {"inc": lambda n: 5 if n == 2 else 0})  # the right assert is not one of them


def test_a_row_without_a_wrong_test_is_named(tmp_path: Path) -> None:
    record = {"prompt": "Add one.", "test": RIGHT, "original_test": RIGHT, "entry_point": "inc"}
    with pytest.raises(UserError, match="row 1: no test contradicts"):
        load(tmp_path, "impossible-livecodebench", record)
