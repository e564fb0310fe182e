"""The rows of the sft, rl and dpo files and their arrow schemas, as verl and TRL read them.

verl takes `rl_*.parquet` (prompt, data_source, reward_model, extra_info, agent_name) and `sft_*.parquet` (messages);
TRL takes `sft_*.parquet` (messages) and `dpo_*.parquet` (prompt, chosen, rejected as messages). Schemas are those of an
example row, so that a file of one row, or of none, has the same types as a large one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upshot.core.conversation import Message, Row
from upshot.tasks.datasets.candidates import Candidate, CandidatePair

if TYPE_CHECKING:
    import pyarrow

BATCH = 250
"""Rows per batch."""
AGENT_NAME = "collabllm_agent"
"""The agent loop that verl runs for a row by default."""


def message_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as the files contain them: role and content."""
    return [{"role": m.role, "content": m.content} for m in messages]


EXAMPLE = Candidate(
    (Message("user", ""),), "", "", score=0.0, goal="", reference="", sessions=[message_dicts([Message("user", "")])]
)
"""A candidate with every column filled."""


def sft_row(candidate: Candidate, system: str) -> dict[str, Any]:
    """One whole conversation to imitate."""
    messages = [*opening(candidate, system), {"role": "assistant", "content": candidate.completion}]
    return {"messages": messages, "conv_id": candidate.conv_id, "score": candidate.score}


def dpo_row(pair: CandidatePair, system: str) -> dict[str, Any]:
    """A history with a better and a worse reply."""
    return {
        "prompt": opening(pair.chosen, system),
        "chosen": [{"role": "assistant", "content": pair.chosen.completion}],
        "rejected": [{"role": "assistant", "content": pair.rejected.completion}],
        "score_chosen": pair.chosen.score,
        "score_rejected": pair.rejected.score,
        "conv_id": pair.chosen.conv_id,
    }


def rl_row(
    candidate: Candidate, system: str, index: int, split: str, source: str, task_desc: str, agent_name: str
) -> dict[str, Any]:
    """A history to reply to, with the hidden goal and the reference."""
    prompt = opening(candidate, system)
    return {
        "prompt": prompt,
        "raw_prompt": prompt,
        "ground_truth": candidate.reference,
        "reward_model": {"style": "rule", "ground_truth": candidate.reference},
        "data_source": source,
        "agent_name": agent_name,
        "index": index,
        "extra_info": {
            "index": index,
            "split": split,
            "conv_id": candidate.conv_id,
            "turn_id": candidate.turn,
            "single_turn_prompt": candidate.goal,
            "single_turn_completion": candidate.reference,
            "single_turn_metadata": json.dumps(dict(candidate.metadata), ensure_ascii=False, default=str),
            "prompt": prompt,
            "completion": candidate.completion,
            "score": candidate.score,
            "sessions": [[{"role": m["role"], "content": m["content"]} for m in s] for s in candidate.sessions],
            "rewards": dict(candidate.rewards),
            "interaction_kwargs": {"name": "collabllm", "single_turn_prompt": candidate.goal, "task_desc": task_desc},
        },
    }


def opening(candidate: Candidate, system: str) -> list[dict[str, str]]:
    """System prompt (if any) and history."""
    return message_dicts([*([Message("system", system)] if system else []), *candidate.history])


def verl_row(row: Row, index: int, split: str, truth: str | None, style: str = "rule", **extra: str) -> dict[str, Any]:
    """A task's row in verl's columns; `truth` is what a verifier compares with, `extra` is added to `extra_info`."""
    return {
        "data_source": row.source,
        "prompt": message_dicts(row.messages),
        "reward_model": {"style": style, "ground_truth": truth},
        "extra_info": {"index": index, "split": split, "id": row.id, **extra},
    }


def verl_schema(*extra: str) -> pyarrow.Schema:
    """The arrow schema of such rows: the same for every task, so that files can be mixed."""
    return _schema_of(verl_row(Row("", EXAMPLE.history), 0, "", "", **dict.fromkeys(extra, "")))


def message_list() -> pyarrow.DataType:
    """The type of a column of messages."""
    import pyarrow as pa

    return pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def schema_for(purpose: str, metrics: Sequence[str] = ()) -> pyarrow.Schema:
    """The arrow schema of the sft, rl or dpo files of candidates; rl rows keep the values of the metrics."""
    if purpose == "sft":
        return _schema_of(sft_row(EXAMPLE, ""))
    if purpose == "dpo":
        return _schema_of(dpo_row(CandidatePair(EXAMPLE, EXAMPLE), ""))
    row = rl_row(replace(EXAMPLE, rewards={name: [0.0] for name in metrics}), "", 0, "", "", "", "")
    if not metrics:  # parquet has no struct without fields
        del row["extra_info"]["rewards"]
    return _schema_of(row)


def _schema_of(row: dict[str, Any]) -> pyarrow.Schema:
    import pyarrow as pa

    return pa.Table.from_pylist([row]).schema


def write_parquet(path: Path, rows: Iterable[dict[str, Any]], schema: pyarrow.Schema) -> int:
    """Write rows so that a reader sees the old file or the new one, never part of it; returns their number.

    They are read and written in batches, so that any number fits into memory.
    """
    import pyarrow as pa
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, count = path.with_name(f".{path.name}.{os.getpid()}"), 0
    left = iter(rows)
    with pa.parquet.ParquetWriter(temporary, schema) as file:
        while batch := list(islice(left, BATCH)):
            file.write_table(pa.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    os.replace(temporary, path)
    return count
