"""CollabLLM's nested records (`*_multiturn.json`: conversations of turns of responses) → one record a response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Record = dict[str, Any]


def unnested(records: Sequence[Record]) -> list[Record]:
    """The records, those that hold turns of responses taken apart; the others stay as they are."""
    if not any(is_nested(record) for record in records):
        return list(records)
    return [flat for number, record in enumerate(records) for flat in _flat(record, number)]


def is_nested(record: Record) -> bool:
    """Whether a record is a whole conversation with the responses that were tried at each turn."""
    turns = record.get("turns")
    return isinstance(turns, list) and all(isinstance(turn, dict) and "responses" in turn for turn in turns)


def _flat(record: Record, number: int) -> Iterator[Record]:
    """One record a response; a conversation without a number of its own has its place in the file."""
    if not is_nested(record):
        yield record
        return
    shared = {"conv_id": number, **{key: value for key, value in record.items() if key != "turns"}}
    for turn in record["turns"]:
        prompt = turn.get("prompt") or []
        for response in turn["responses"]:
            yield {**shared, "prompt": prompt, "turn_id": len(prompt), **response}
