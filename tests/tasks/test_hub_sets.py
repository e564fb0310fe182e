"""Data sets on the Hub that may disappear, or that are larger than the part used in the paper."""

from __future__ import annotations

import random
from typing import Any

import pytest

from upshot.core.errors import UserError
from upshot.tasks.base import tasks
from upshot.tasks.datasets.files import Record


def serve(monkeypatch: pytest.MonkeyPatch, sets: dict[str, list[Record]]) -> None:
    """A Hub with these data sets, each with a split train."""

    def read(source: str, *_: Any) -> dict[str, list[Record]]:
        if source not in sets:
            raise UserError(f"cannot load '{source}' from Hugging Face")
        return {"train": sets[source]}

    monkeypatch.setattr("upshot.tasks.tables.read_tables", read)


def test_math_hard_is_read_from_its_other_set_where_the_first_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"problem": f"p{n}", "solution": "s", "level": f"Level {n % 5 + 1}", "type": "Algebra"} for n in range(50)]
    serve(monkeypatch, {"DigitalLearningGmbH/MATH-lighteval": rows})
    loaded = tasks.create("math-hard", {}, "task").all_rows()
    assert sum(map(len, loaded.values())) == 10  # level 5 only
    serve(monkeypatch, {})
    with pytest.raises(UserError, match="cannot load 'lighteval/MATH-Hard'"):
        tasks.create("math-hard", {}, "task").rows("train")


def test_documents_are_the_newest_short_articles_of_the_papers_set(monkeypatch: pytest.MonkeyPatch) -> None:
    articles = [{"title": f"t{n}", "text": f"text {n}", "timestamp": f"2020-01-01 00:{n:04d}"} for n in range(400)]
    articles[399] = {**articles[399], "text": "word " * 400}
    serve(monkeypatch, {"Kamaljp/medium_articles": articles})
    loaded = tasks.create("medium", {}, "task").all_rows()
    titles = {row.meta["title"] for rows in loaded.values() for row in rows}
    assert titles == {f"t{n}" for n in range(390, 399)}  # 2.5 % of 400, one of which is too long


def test_documents_and_code_are_tested_on_what_the_published_conversations_are_not_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    articles = [{"title": f"t{n}", "text": f"text {n}", "timestamp": f"2020-01-01 {n:05d}"} for n in range(4000)]
    problems = [{"instruct_prompt": f"p{n}", "task_id": f"BigCodeBench/{n}"} for n in range(1140)]
    undated = {"title": "undated", "text": "text", "timestamp": None}
    serve(monkeypatch, {"Kamaljp/medium_articles": [undated, *articles], "bigcode/bigcodebench": problems})

    recent = articles[3900:]  # as the original splits them: shuffled with seed 42, the first 0.5 % of all for testing
    random.Random(42).shuffle(recent)
    loaded = tasks.create("medium", {}, "task").all_rows()
    assert {row.meta["title"] for row in loaded["test"]} == {article["title"] for article in recent[:20]}
    assert {row.meta["title"] for row in loaded["train"]} == {article["title"] for article in recent[20:]}

    order = list(range(1140))  # the last fifth of the numbers, shuffled with seed 42
    random.Random(42).shuffle(order)
    loaded = tasks.create("bigcodebench", {}, "task").all_rows()
    assert {row.meta["task_id"] for row in loaded["test"]} == {f"BigCodeBench/{n}" for n in order[912:]}
    assert len(loaded["train"]) == 912 and set(loaded) == {"train", "test"}
