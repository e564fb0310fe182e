"""A build's journal → rows of the published format, one per candidate reply, and a summary in numbers.

The columns are those of CollabLLM's own sets, so that its converters and metrics run on them: `sessions` are whole
transcripts, the user's end signal included; `rewards` has the weighted sum as `MR`; `conv_id` is a number.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.core.conversation import Row
from upshot.core.errors import UserError
from upshot.tasks.datasets.parquet import message_list, write_parquet

FILE = "candidates.parquet"
MR = "MR"
"""The multiturn-aware reward of each future, among its metrics."""


def published_rows(
    rows: Sequence[Row], lines: Iterable[Mapping[str, Any]], weights: Mapping[str, float]
) -> list[dict[str, Any]]:
    """One row per candidate that has a score, in the order of goals and turns.

    The original's converters compare scores; candidates without one stay in the journal, with the reason.
    """
    by_conversation: dict[str, list[Mapping[str, Any]]] = {}
    for line in latest_lines(lines):
        by_conversation.setdefault(line["conv"], []).append(line)
    out = []
    for row in rows:
        history = [{"role": m.role, "content": m.content} for m in row.messages if m.role != "system"]
        for line in by_conversation.get(row.id, ()):
            for candidate in line.get("candidates", ()):
                if candidate["score"] is not None:
                    out.append(_row(row, list(history), candidate, weights))
            if line.get("best") is not None:
                history.append({"role": "assistant", "content": line["candidates"][line["best"]]["completion"]})
            if line.get("next") is not None:
                history.append({"role": "user", "content": line["next"]["content"]})
    return out


def latest_lines(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last line of every turn: a turn that failed and was retried counts once."""
    return list({(line["conv"], line["turn"]): line for line in lines}.values())


def _row(
    row: Row, history: list[dict[str, str]], candidate: Mapping[str, Any], weights: Mapping[str, float]
) -> dict[str, Any]:
    start = [*history, {"role": "assistant", "content": candidate["completion"]}]
    return {
        "prompt": history,
        "completion": candidate["completion"],
        "conv_id": number_of(row.id),
        "turn_id": len(history),
        "score": candidate["score"],
        "single_turn_prompt": str(row.goal),
        "single_turn_completion": "" if row.reference is None else str(row.reference),
        "single_turn_metadata": {"source": row.source} | {k: v for k, v in row.meta.items() if k != "task_desc"},
        "sessions": [start + session for session in candidate["sessions"]],
        "rewards": {**candidate["rewards"], MR: weighted_sums(candidate["rewards"], weights)},
    }


def number_of(name: str) -> int:
    """A number for a conversation that stays unique when sets are merged."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")


def weighted_sums(rewards: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> list[float | None]:
    """The weighted sum of the metrics for every future, without clamps; None where one of them is missing."""
    futures = zip(*(rewards[name] for name in rewards), strict=True)
    factors = [weights[name] for name in rewards]
    return [
        None if None in values else sum(f * v for f, v in zip(factors, values, strict=True) if v is not None)
        for values in futures
    ]


def write_published(folder: Path, rows: Sequence[dict[str, Any]], metrics: Sequence[str]) -> Path:
    """Write `candidates.parquet`."""
    import pyarrow as pa

    text, number, messages = pa.string(), pa.float64(), message_list()
    facts = metadata_column([row["single_turn_metadata"] for row in rows])
    schema = pa.schema(
        [
            ("prompt", messages),
            ("completion", text),
            ("conv_id", pa.int64()),
            ("turn_id", pa.int64()),
            ("score", number),
            ("single_turn_prompt", text),
            ("single_turn_completion", text),
            ("single_turn_metadata", pa.array(facts).type if facts else pa.struct([("source", text)])),
            ("sessions", pa.list_(messages)),
            ("rewards", pa.struct([(name, pa.list_(number)) for name in (*metrics, MR)])),
        ]
    )
    path = folder / FILE
    write_parquet(path, [{**row, "single_turn_metadata": f} for row, f in zip(rows, facts, strict=True)], schema)
    return path


def metadata_column(facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Metadata with the same keys in every row; values of mixed types become JSON text."""
    keys = dict.fromkeys(key for one in facts for key in one)
    columns = {key: _one_type([one.get(key) for one in facts]) for key in keys}
    return [{key: columns[key][i] for key in keys} for i in range(len(facts))]


def _one_type(values: list[Any]) -> list[Any]:
    import pyarrow as pa

    try:
        kind = pa.array(values).type
        if pa.types.is_struct(kind) and not kind.num_fields:  # parquet has no struct without fields
            raise pa.ArrowInvalid(kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return [None if value is None else json.dumps(value, ensure_ascii=False, default=str) for value in values]
    return values


def summarise(rows: Sequence[Row], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The progress of a build, in numbers."""
    lines = latest_lines(lines)
    ended = Counter(line["ended"] for line in lines if line["ended"])
    turns = [line for line in lines if "candidates" in line]
    candidates = [candidate for line in turns for candidate in line["candidates"]]
    best = [line["candidates"][line["best"]] for line in turns if line["best"] is not None]
    scores = [c["score"] for c in candidates if c["score"] is not None]
    why = next((line["why"] for line in lines if line.get("why")), "")
    return {
        "goals": len(rows),
        "finished": sum(bool(line["ended"]) and not line.get("failed") for line in lines),
        "failed": sum(bool(line.get("failed")) for line in lines),
        "turns": len(turns),
        "candidates": len(candidates),
        "missing": dict(Counter(c["missing"] for c in candidates if c["missing"])),
        "ended": dict(ended),
        **({"first_failure": why} if why else {}),
        "mean_score": sum(scores) / len(scores) if scores else None,
        "mean_best": sum(c["score"] for c in best) / len(best) if best else None,
        "best_proactive": sum(c["prompt"] == "proactive" for c in best) / len(best) if best else None,
    }


def push(path: Path, name: str) -> None:
    """Push the finished set to the Hub as a private dataset."""
    try:
        from datasets import Dataset
    except ImportError as error:
        raise UserError("--push needs the datasets package: pip install -e '.[hub]'") from error
    try:
        Dataset.from_parquet(str(path)).push_to_hub(name, private=True)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot push to '{name}': {str(error).splitlines()[0]}; the set is in {path}") from error
