"""Rows of a task, sent to verl's workers as ids.

verl's dataset knows only the split and the id of a row. A worker opens the same task of the same recipe and looks the
row up there, so goals and references are not sent and cannot be mixed up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.core.conversation import Row
from upshot.core.errors import UserError
from upshot.core.files import write_json
from upshot.rollout.prompt_length import PromptLengthFilter
from upshot.tasks.base import Task

AGENT = "upshot"
"""The name under which verl knows our agent loop."""


def record_of(row: Row, index: int, split: str) -> dict[str, Any]:
    """A row in the columns that verl looks for."""
    return {
        "raw_prompt": [{"role": "user", "content": row.id}],
        "data_source": row.source or "upshot",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "agent_name": AGENT,
        "index": index,
        "extra_info": {"split": split, "id": row.id, "index": index, "opening": digest_of(row)},
    }


def digest_of(row: Row) -> str:
    """A hash of the row's opening, which detects a worker whose files differ from the driver's."""
    opening = json.dumps([(message.role, message.content) for message in row.messages])
    return hashlib.sha256(opening.encode()).hexdigest()[:16]


def write_rows(path: Path, rows: Sequence[Row], split: str) -> None:
    """Write the rows of a split for verl's dataset."""
    if not rows:
        raise UserError(f"the split '{split}' has no rows; check the options under `task`")
    by_id(rows, split)
    write_json(path, [record_of(row, number, split) for number, row in enumerate(rows)])


def by_id(rows: Sequence[Row], split: str) -> dict[str, Row]:
    """Rows by their id, which must be unique."""
    rows_by_id: dict[str, Row] = {}
    for row in rows:
        if rows_by_id.setdefault(row.id, row) is not row:
            raise UserError(f"two rows of split '{split}' are called '{row.id}'; verl's workers find rows by their id")
    return rows_by_id


class RowIndex:
    """The rows of a task, looked up by what verl passes to a worker."""

    def __init__(self, task: Task, lengths: PromptLengthFilter | None = None) -> None:
        self.task = task
        self.lengths = lengths
        """The length to which openings are cut, if the recipe says so."""
        self._splits: dict[str, dict[str, Row]] = {}

    def row(self, extra_info: Mapping[str, Any]) -> Row:
        """The task's own row; `UserError` if the run was prepared with different rows."""
        split, name = str(extra_info["split"]), str(extra_info["id"])
        if split not in self._splits:
            self._splits[split] = by_id(self.task.rows(split), split)
        row = self._splits[split].get(name)
        if row is None:
            raise UserError(f"row '{name}' of the run is not in split '{split}' of task '{self.task.name}' here")
        if self.lengths is not None and not self.lengths.fits(row):
            row = self.lengths.cut(row) or row
        if extra_info["opening"] != digest_of(row):
            raise UserError(f"row '{name}' of the run has another opening than in task '{self.task.name}' here")
        return row
