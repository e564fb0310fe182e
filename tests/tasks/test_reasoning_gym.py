"""reasoning-gym's generators as a task: rows, its own scorer, feedback. A small stand-in is used if the library is not
installed."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError
from upshot.tasks.base import Task, tasks
from upshot.tasks.environments import reasoning_gym
from upshot.tasks.environments.reasoning_gym import NO_ANSWER, WRONG, read_answer
from upshot.tasks.verifiers.base import verifiers


class Sums:
    """A generator with the library's interface: problem `index` depends on seed + index; half marks for a near
    answer."""

    def __init__(self, seed: int, size: int, largest: int = 400) -> None:
        assert largest > 0, "largest must be positive"
        self.seed, self.size, self.largest = seed, size, largest

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(self.seed + index)
        left, right = rng.randint(0, self.largest), rng.randint(0, self.largest)
        return {"question": f"{left} + {right} =", "answer": str(left + right), "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        off = abs(int(answer or 0) - int(entry["answer"]))
        return {0: 1.0, 1: 0.5}.get(off, 0.0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"sums": Sums}  # type: ignore[attr-defined]
    factory.create_dataset = lambda name, **settings: factory.DATASETS[name](**settings)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    reasoning_gym._make_dataset.cache_clear()
    yield
    reasoning_gym._make_dataset.cache_clear()


def sums(**options: Any) -> Task:
    return tasks.create("reasoning-gym", {"dataset": "sums", "rows_per_split": 40, **options})


def talk(row: Row, *replies: str) -> Conversation:
    conversation = Conversation(row)
    for reply in replies:
        conversation.say(Message("assistant", reply))
    return conversation


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("so <answer> 4 </answer>", "4"),
        ("<answer>3</answer>, no: <answer>4</answer>", "4"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("4", None),
        ("<answer>4", None),
    ],
)
def test_the_answer_is_the_content_of_the_last_pair_of_tags(reply: str, answer: str | None) -> None:
    assert read_answer(reply) == answer


def test_splits_share_no_question_and_are_repeatable(library: None) -> None:
    once, again = sums(), sums()
    splits = {split: list(once.rows(split)) for split in ("train", "validation", "test")}
    questions = [row.messages[-1].content for rows in splits.values() for row in rows]
    assert len(questions) == len(set(questions)) > 100
    assert all(list(again.rows(split)) == rows for split, rows in splits.items())
    assert sums(seed=1).rows("train")[0] != splits["train"][0]


def test_a_generator_with_few_questions_keeps_the_test_set_out_of_training(library: None) -> None:
    few = sums(arguments={"largest": 9})
    test, train = ({row.messages[-1].content for row in few.rows(split)} for split in ("test", "train"))
    assert test and train and not test & train
    with pytest.raises(UserError, match=r"'sums' makes too few different questions \(test 4, validation 0, train 0"):
        sums(arguments={"largest": 1}).rows("train")


def test_the_generators_own_scorer_is_the_verifier(library: None) -> None:
    task = sums()
    row = task.rows("test")[3]
    right = int(row.reference)

    def verdict(reply: str) -> float | None:
        return asyncio.run(task.verify(talk(row, reply))).value

    assert [verdict(f"<answer>{right + off}</answer>") for off in (0, 1, 2)] == [1.0, 0.5, 0.0]
    assert verdict(str(right)) == 0.0, "no tags, no answer"
    assert asyncio.run(task.verify(talk(row))).is_missing


def test_a_claim_is_plain_data_that_gives_the_same_verdict_in_another_process(library: None) -> None:
    task = sums()
    row = task.rows("train")[5]
    claim = task.claim(talk(row, task.answer_text(row)))
    assert claim is not None
    options, extra = json.loads(json.dumps([claim.options, claim.extra]))
    reasoning_gym._make_dataset.cache_clear()
    assert verifiers.create(claim.source, options).score(claim.response, claim.reference, extra).value == 1.0


def test_feedback_mentions_the_form_and_on_request_the_answer(library: None) -> None:
    row = sums().rows("train")[0]
    wrong = f"<answer>{int(row.reference) + 9}</answer>"

    def feedback(task: Task, reply: str) -> list[str]:
        environment = task.environment()
        assert environment is not None
        return [message.content for message in asyncio.run(environment.observe(talk(row, reply))).messages]

    assert feedback(sums(), "no idea") == [NO_ANSWER]
    assert feedback(sums(), wrong) == []
    assert feedback(sums(tell=True), wrong) == [WRONG]
    assert feedback(sums(tell=True), sums().answer_text(row)) == []


def test_demonstrations_are_the_questions_with_their_answers(library: None) -> None:
    task = sums(system="Be brief.")
    first, row = task.dialogues("train")[0], task.rows("train")[0]
    assert [message.role for message in first] == ["system", "user", "assistant"]
    assert first[-1].content == f"<answer>{row.reference}</answer>" and task.format_error(first[-1].content) == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "sum"}, r"task\.dataset 'sum' is not in reasoning-gym; did you mean 'sums'"),
        ({"arguments": {"largest": 0}}, r"task\.arguments .* do not fit .*'sums': largest must be positive"),
        ({"arguments": {"smallest": 0}}, r"task\.arguments .* do not fit .*'sums': .*smallest"),
    ],
)
def test_a_wrong_generator_or_setting_is_refused_in_one_line(
    library: None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        sums(**options).rows("train")


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    reasoning_gym._make_dataset.cache_clear()
    with pytest.raises(UserError, match=r"needs the library: pip install -e '\.\[reasoning-gym\]'"):
        sums().rows("train")


@pytest.mark.parametrize(
    ("dataset", "arguments"), [("chain_sum", {"max_terms": 3}), ("spell_backward", {}), ("countdown", {})]
)
def test_the_library_gives_its_own_answers_full_marks(dataset: str, arguments: dict[str, Any]) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (the extra 'reasoning-gym')")
    task = tasks.create("reasoning-gym", {"dataset": dataset, "arguments": arguments, "rows_per_split": 8})
    for row in task.rows("test"):
        assert asyncio.run(task.verify(talk(row, task.answer_text(row)))).value == 1.0
        assert asyncio.run(task.verify(talk(row, "<answer>no</answer>"))).value < 1.0  # type: ignore[operator]
