"""A build's journal → rows of the published format, one per candidate reply, and what happened in numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.chat import Row
from upshot.data.parquet import write_parquet
from upshot.errors import UserError

FILE = "candidates.parquet"


def published_rows(rows: Sequence[Row], lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per candidate that was given, in the order of goals and turns; a missing score stays missing."""
    by_conversation: dict[str, list[Mapping[str, Any]]] = {}
    for line in latest(lines):
        by_conversation.setdefault(line["conv"], []).append(line)
    out = []
    for row in rows:
        history = [{"role": m.role, "content": m.content} for m in row.messages if m.role != "system"]
        for line in by_conversation.get(row.id, ()):
            for candidate in line.get("candidates", ()):
                if candidate["completion"] is not None:
                    out.append(_row(row, list(history), candidate))
            if line.get("best") is not None:
                history.append({"role": "assistant", "content": line["candidates"][line["best"]]["completion"]})
            if line.get("next") is not None:
                history.append({"role": "user", "content": line["next"]["content"]})
    return out


def latest(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last word on every turn: one that failed and was tried again later counts once."""
    return list({(line["conv"], line["turn"]): line for line in lines}.values())


def _row(row: Row, history: list[dict[str, str]], candidate: Mapping[str, Any]) -> dict[str, Any]:
    meta = {key: value for key, value in row.meta.items() if key != "task_desc"}
    return {
        "prompt": history,
        "completion": candidate["completion"],
        "conv_id": row.id,
        "turn_id": len(history),
        "score": candidate["score"],
        "single_turn_prompt": str(row.goal),
        "single_turn_completion": "" if row.reference is None else str(row.reference),
        "single_turn_metadata": json.dumps(meta, ensure_ascii=False, default=str),
        "sessions": candidate["sessions"],
        "rewards": candidate["rewards"],
    }


def write_published(folder: Path, rows: Sequence[dict[str, Any]], metrics: Sequence[str]) -> Path:
    """Write `candidates.parquet`."""
    import pyarrow as pa

    text, number = pa.string(), pa.float64()
    messages = pa.list_(pa.struct([("role", text), ("content", text)]))
    single_turn = [(f"single_turn_{part}", text) for part in ("prompt", "completion", "metadata")]
    schema = pa.schema(
        [
            ("prompt", messages),
            ("completion", text),
            ("conv_id", text),
            ("turn_id", pa.int64()),
            ("score", number),
            *single_turn,
            ("sessions", pa.list_(messages)),
            ("rewards", pa.struct([(name, pa.list_(number)) for name in metrics])),
        ]
    )
    path = folder / FILE
    write_parquet(path, rows, schema)
    return path


def summarise(rows: Sequence[Row], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a build has done so far, in numbers."""
    lines = latest(lines)
    ended = Counter(line["ended"] for line in lines if line["ended"])
    turns = [line for line in lines if "candidates" in line]
    candidates = [candidate for line in turns for candidate in line["candidates"]]
    best = [line["candidates"][line["best"]] for line in turns if line["best"] is not None]
    scores = [c["score"] for c in candidates if c["score"] is not None]
    return {
        "goals": len(rows),
        "finished": sum(bool(line["ended"]) and not line.get("failed") for line in lines),
        "failed": sum(bool(line.get("failed")) for line in lines),
        "turns": len(turns),
        "candidates": len(candidates),
        "missing": dict(Counter(c["missing"] for c in candidates if c["missing"])),
        "ended": dict(ended),
        "mean_score": sum(scores) / len(scores) if scores else None,
        "mean_best": sum(c["score"] for c in best) / len(best) if best else None,
        "best_proactive": sum(c["prompt"] == "proactive" for c in best) / len(best) if best else None,
    }


def push(path: Path, name: str) -> None:
    """Push the finished set to the Hub as a private dataset."""
    try:
        from datasets import Dataset
    except ImportError as error:
        raise UserError("--push needs the datasets package: pip install 'upshot[hub]'") from error
    try:
        Dataset.from_parquet(str(path)).push_to_hub(name, private=True)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot push to '{name}': {str(error).splitlines()[0]}; the set is in {path}") from error
