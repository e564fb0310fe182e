"""Rows of a task ↔ verl's parquet.

A file carries what verl itself reads (prompt, data_source, ground truth) and where the row stands in the task (split
and id). A worker makes the same task of the same recipe and looks the row up there: goals and references need not
survive a trip through arrow, and no goal can land at another row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upshot.core.conversation import Row, messages_from
from upshot.core.errors import UserError
from upshot.rollout.prompt_length import PromptLengthFilter
from upshot.tasks.base import Task
from upshot.tasks.datasets.parquet import verl_row, verl_schema, write_parquet

if TYPE_CHECKING:
    import pyarrow

AGENT = "upshot"
"""The name under which verl knows our agent loop."""


def record_of(row: Row, index: int, split: str) -> dict[str, Any]:
    """A row in verl's columns."""
    truth = row.reference if isinstance(row.reference, str) else json.dumps(row.reference, default=str)
    return {**verl_row(row, index, split, truth), "agent_name": AGENT}


def schema() -> pyarrow.Schema:
    """The arrow schema of the files, the same for one row and for many."""
    import pyarrow as pa

    return verl_schema().append(pa.field("agent_name", pa.string()))


def write_rows(path: Path, rows: Sequence[Row], split: str) -> int:
    """Write the rows of a split for verl; how many there are."""
    if not rows:
        raise UserError(f"the split '{split}' has no rows; look at the options under `task`")
    by_id(rows, split)
    write_parquet(path, [record_of(row, number, split) for number, row in enumerate(rows)], schema())
    return len(rows)


def by_id(rows: Sequence[Row], split: str) -> dict[str, Row]:
    """Rows by their id, which must be their own."""
    found: dict[str, Row] = {}
    for row in rows:
        if found.setdefault(row.id, row) is not row:
            raise UserError(
                f"two rows of the split '{split}' are called '{row.id}'; verl's workers find a row by its id"
            )
    return found


class RowIndex:
    """The rows of a task, found again from what verl hands to a worker."""

    def __init__(self, task: Task, room: PromptLengthFilter | None = None) -> None:
        self.task = task
        self.room = room
        """What an opening that is too long is cut to, where the recipe says so."""
        self._splits: dict[str, dict[str, Row]] = {}

    def row(self, extra_info: Mapping[str, Any], raw_prompt: Sequence[Mapping[str, Any]]) -> Row:
        """The task's own row; `UserError` where the file was made of other rows."""
        split, name = str(extra_info["split"]), str(extra_info["id"])
        if split not in self._splits:
            self._splits[split] = by_id(self.task.rows(split), split)
        row = self._splits[split].get(name)
        if row is None:
            raise UserError(f"row '{name}' of the parquet is not in split '{split}' of task '{self.task.name}' here")
        if self.room is not None and not self.room.fits(row):
            row = self.room.cut(row) or row
        told = [(m.role, m.content) for m in messages_from(list(raw_prompt))]
        if told != [(m.role, m.content) for m in row.messages]:
            raise UserError(f"row '{name}' of the parquet has another opening than in task '{self.task.name}' here")
        return row
