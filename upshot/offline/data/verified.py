"""Records of a task with a verifier → rl parquet, as verl and the task itself read it, split by question.

Questions, prompts and references are the task's own reading of a record (`VerifiedTask.parse`): nothing here knows the
columns of any set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upshot.core.conversation import Row
from upshot.core.errors import UserError
from upshot.core.files import check_writable
from upshot.offline.data.prepare import PrepareSummary, check_rows, check_share, write_splits
from upshot.tasks.base import tasks
from upshot.tasks.collabllm import goal_key
from upshot.tasks.datasets.candidate import UnusableRecord
from upshot.tasks.datasets.collabllm_goals import held_out, plain
from upshot.tasks.datasets.rows import METADATA
from upshot.tasks.datasets.tables import Record, read_tables
from upshot.tasks.datasets.truth import TEST_COLUMNS, ground_truth, style
from upshot.tasks.judged import is_behaviour
from upshot.tasks.verified import VerifiedTask
from upshot.tasks.verifiers.base import verifiers

if TYPE_CHECKING:
    import pyarrow

UNUSED = ("outputs", "input_ids_prompt", "input_ids", "labels", "solutions", "incorrect_solutions")
"""Columns of the published sets that no row is made of, and most of their bytes."""
SAID_ELSEWHERE = {*TEST_COLUMNS, "question", "data_source", "index", "split", "id", "ground_truth"}


def verified_task(name: str, seed: int = 0, system: str = "") -> VerifiedTask | None:
    """The task whose records are prepared: by its own name, or by that of a behaviour; None: another kind of task."""
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
    dataset: str, out: Path, task: VerifiedTask, validation: float = 0.1, seed: int = 0
) -> PrepareSummary:
    """Write `rl_train.parquet` and `rl_validation.parquet` under `out`, and say what was dropped."""
    check_share(validation)
    check_writable(out / "rl_train.parquet")
    tables = read_tables(dataset, without=UNUSED)
    summary = PrepareSummary("rl", read=sum(map(len, tables.values())))
    parsed = {split: _rows(task, records, summary.dropped) for split, records in tables.items()}
    splits = split_rows(parsed, validation, seed, summary.dropped)
    check_rows(splits, dataset, summary)
    for split, rows in splits.items():
        summary.rows[split] = len(rows)
        summary.goals[split] = len(set(map(question_key, rows)))
    records = {s: [record_of(row, number, s) for number, row in enumerate(rows)] for s, rows in splits.items()}
    write_splits(out, records, schema(), summary)
    return summary


def _rows(task: VerifiedTask, records: Sequence[Record], dropped: Counter[str]) -> list[Row]:
    """The rows that can be scored; what cannot is counted."""
    found: dict[str, Row] = {}
    for record in records:
        try:
            row = task.parse(record)
            ground_truth(row)
        except UserError as error:
            dropped[str(error).partition(" (")[0].partition(";")[0]] += 1
        except UnusableRecord as why:
            dropped[str(why)] += 1
        else:
            if found.setdefault(goal_key(row), row) is not row:
                dropped["same prompt"] += 1
    return list(found.values())


def split_rows(
    tables: Mapping[str, Sequence[Row]], share: float, seed: int, dropped: Counter[str]
) -> dict[str, list[Row]]:
    """Train and validation without a shared question; the source's own split where it has one, its test included."""
    train = list(tables.get("train", ()))
    held = [row for split, rows in tables.items() if split != "train" for row in rows]
    if train and held:
        taken = set(map(question_key, held))
        kept = [row for row in train if question_key(row) not in taken]
        if len(kept) < len(train):
            dropped["question also in validation"] += len(train) - len(kept)
        return {"train": kept, "validation": held}
    rows = train or held
    taken = held_out(map(question_key, rows), share, seed)
    return {
        "train": [row for row in rows if question_key(row) not in taken],
        "validation": [row for row in rows if question_key(row) in taken],
    }


def question_key(row: Row) -> str:
    """By what rows are held together in a split: the question, without a hint or the choices below it."""
    return plain(str(row.meta.get("question") or "")) or goal_key(row)


def record_of(row: Row, index: int, split: str) -> dict[str, Any]:
    """A row in verl's columns: what its verifier compares with is the ground truth, what else it knows is JSON."""
    meta = {key: value for key, value in row.meta.items() if key not in SAID_ELSEWHERE}
    return {
        "data_source": row.source,
        "prompt": [{"role": m.role, "content": m.content} for m in row.messages],
        "reward_model": {"style": style(row), "ground_truth": ground_truth(row)},
        "extra_info": {
            "index": index,
            "split": split,
            "id": row.id,
            "question": str(row.meta.get("question", "")),
            METADATA: json.dumps(meta, ensure_ascii=False, default=str),
        },
    }


def schema() -> pyarrow.Schema:
    """The arrow schema of the files: the same for every task, so that they can be mixed."""
    import pyarrow as pa

    text = pa.string()
    places = [("index", pa.int64()), ("split", text), ("id", text), ("question", text), (METADATA, text)]
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct(places)),
        ]
    )
