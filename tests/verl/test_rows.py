"""Rows are passed to verl's workers and found again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from upshot.core.conversation import Message, Row
from upshot.core.errors import UserError
from upshot.tasks.base import Task
from upshot.verl.rows import RowIndex, record_of, write_rows


class Wishes(Task):
    """A thousand rows, each with a goal that is not plain data."""

    name = "wishes"

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def rows(self, split: str) -> Sequence[Row]:
        return self._rows


class Goal:
    """A goal that cannot be written to a file."""

    def __init__(self, number: int) -> None:
        self.number = number


def wishes(count: int) -> list[Row]:
    said = (Message("user", "guess what I want"),)
    return [Row(f"wanted/{n}", said, Goal(n), reference=n, source="wishes") for n in range(count)]


def test_a_thousand_rows_with_a_thousand_goals_are_found_by_their_own_goal(tmp_path: Path) -> None:
    rows = wishes(1000)
    file = tmp_path / "data" / "train.json"
    write_rows(file, rows, "train")
    book, records = RowIndex(Wishes(rows)), json.loads(file.read_text())
    assert len(records) == 1000
    for number, record in enumerate(records):
        assert book.row(record["extra_info"]).goal.number == number == record["index"]
        assert record["agent_name"] == "upshot" and "guess" not in json.dumps(record), "nothing of the row travels"


def test_duplicate_row_names_and_runs_with_different_rows_are_refused(tmp_path: Path) -> None:
    rows = wishes(2)
    with pytest.raises(UserError, match="called 'wanted/0'"):
        write_rows(tmp_path / "x.json", [rows[0], wishes(1)[0]], "train")
    with pytest.raises(UserError, match="no rows"):
        write_rows(tmp_path / "x.json", [], "train")
    book = RowIndex(Wishes(rows))
    place = record_of(rows[1], 1, "train")["extra_info"]
    with pytest.raises(UserError, match="another opening"):
        book.row({**place, "opening": "something else"})
    with pytest.raises(UserError, match="not in split"):
        book.row({**place, "id": "wanted/9"})
