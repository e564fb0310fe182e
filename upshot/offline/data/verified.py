"""Records of a task with a verifier → rl parquet, as verl and the task itself read it, split by question.

The task itself reads questions, prompts and references from a record (`VerifiedTask.parse`): nothing here knows the
columns of any set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from upshot.core.conversation import Row
from upshot.core.errors import UserError
from upshot.offline.data.prepare import PrepareSummary, read_splits, write_splits
from upshot.run.checks.profiles import profile_files
from upshot.tasks.base import tasks
from upshot.tasks.datasets.files import Record
from upshot.tasks.datasets.parquet import verl_row, verl_schema
from upshot.tasks.datasets.records import METADATA
from upshot.tasks.datasets.splits import goal_key, plain
from upshot.tasks.judged import is_behaviour
from upshot.tasks.verified import VerifiedTask
from upshot.tasks.verifiers.base import BadRow, Verifier, verifiers
from upshot.tasks.verifiers.code import TEST_COLUMNS

UNUSED = ("outputs", "input_ids_prompt", "input_ids", "labels", "solutions", "incorrect_solutions")
"""Columns of the published sets that no row needs, and that are most of their bytes."""
SAID_ELSEWHERE = {*TEST_COLUMNS, "question", "data_source", "index", "split", "id", "ground_truth"}


def verified_task(name: str, seed: int = 0, system: str = "") -> VerifiedTask | None:
    """The task whose records are prepared, by its name or by that of a behaviour; None: another kind of task."""
    options: dict[str, Any] = {"split_seed": seed, "system": system}
    if name not in tasks and name in verifiers and is_behaviour(name):
        name, options = "judged", {**options, "behaviour": name}
    kind = tasks.get(name, "--task")
    if not (isinstance(kind, type) and issubclass(kind, VerifiedTask)):
        return None
    task = tasks.create(name, options, "--task")
    assert isinstance(task, VerifiedTask)
    return task


def prepare_verified(
    dataset: str, out: Path, task: VerifiedTask, validation: float = 0.1, seed: int = 0, sandbox: str = "local"
) -> PrepareSummary:
    """Write `rl_train.parquet` and `rl_validation.parquet` under `out`, and say what was dropped.

    If rows test programs, the sandbox measures what their checks can decide; the profiles are kept beside the files.
    """
    held_out = (validation, seed, UNUSED, "question")
    summary, splits = read_splits(
        dataset, out, "rl", partial(_rows, task), lambda rows: list(map(question_key, rows)), *held_out
    )
    summary.goals = {split: len(set(map(question_key, rows))) for split, rows in splits.items()}
    records = {s: [record_of(row, number, s) for number, row in enumerate(rows)] for s, rows in splits.items()}
    write_splits(dataset, out, records, verl_schema("question", METADATA), summary)
    summary.profiles = profile_files(summary.files, out, task, sandbox)
    return summary


def _rows(task: VerifiedTask, records: Sequence[Record], dropped: Counter[str]) -> list[Row]:
    """The rows that can be scored; all others are counted."""
    rows: dict[str, Row] = {}
    for record in records:
        try:
            row = task.parse(record)
            verifier_of(row).ground_truth(row.reference, row.meta)
        except UserError as error:
            dropped[str(error).partition(" (")[0].partition(";")[0]] += 1
        except BadRow as why:
            dropped[str(why)] += 1
        else:
            if rows.setdefault(goal_key(row), row) is not row:
                dropped["same prompt"] += 1
    return list(rows.values())


def verifier_of(row: Row) -> type[Verifier]:
    """The verifier of a row."""
    kind = verifiers.get(row.source, "the row's source")
    if not (isinstance(kind, type) and issubclass(kind, Verifier)):
        raise UserError(f"verifier '{row.source}' is not a subclass of `Verifier`")
    return kind


def question_key(row: Row) -> str:
    """The key that keeps rows in the same split: the question, without a hint or the choices below it."""
    return plain(str(row.meta.get("question") or "")) or goal_key(row)


def record_of(row: Row, index: int, split: str) -> dict[str, Any]:
    """A row in verl's columns: `ground_truth` is what its verifier compares with; all other fields are JSON text."""
    meta = {key: value for key, value in row.meta.items() if key not in SAID_ELSEWHERE}
    verifier = verifier_of(row)
    style = "model" if "judge" in verifier.needs else "rule"
    truth = verifier.ground_truth(row.reference, row.meta)
    extra = {"question": str(row.meta.get("question", "")), METADATA: json.dumps(meta, ensure_ascii=False, default=str)}
    return verl_row(row, index, split, truth, style, **extra)
