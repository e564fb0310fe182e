"""Examples to learn from on disk: whole dialogues, and pairs of replies of which one is better. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshot.core.conversation import Message, messages_from
from upshot.core.errors import UserError
from upshot.tasks.datasets.collabllm_records import is_dialogue

COLUMNS = ("prompt", "chosen", "rejected")
SCORES = ("score_chosen", "score_rejected")
ROUNDING = 1e-9
"""So that 0.7 − 0.2 counts as a gap of 0.5."""


@dataclass(frozen=True)
class Preference:
    """Two replies to the same history, of which the first is better."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


def read_dialogues(path: str, key: str = "train.data") -> list[tuple[Message, ...]]:
    """Whole conversations from a parquet or JSONL file with a `messages` column (or prompt and completion).

    A `prompt` that ends with the assistant is a whole conversation, too: so the verl recipe writes them.
    """
    dialogues = []
    for record in _records(path, "sft", key):
        messages = record.get("messages")
        if messages is None and "prompt" in record and "completion" in record:
            messages = [*_as_messages(record["prompt"], "user"), *_as_messages(record["completion"], "assistant")]
        elif messages is None and is_dialogue(record.get("prompt")):
            messages = record["prompt"]
        if messages is None:
            raise UserError(f"{key} '{path}': a row has no 'messages' and no 'prompt' with 'completion'")
        dialogues.append(messages_from(messages))
    return dialogues


def read_preferences(path: str, min_gap: float, key: str = "train.data") -> list[Preference]:
    """Pairs of a parquet or JSONL file whose scores are at least `min_gap` apart."""
    needed = (*COLUMNS, *(SCORES if min_gap else ()))
    found = []
    for number, record in enumerate(_records(path, "dpo", key), start=1):
        absent = [name for name in needed if record.get(name) is None]
        if absent:
            why = f" (train.dpo.min_gap is {min_gap:g})" if absent[0] in SCORES else ""
            raise UserError(f"{key} '{path}': row {number} has no '{absent[0]}'{why}; it has {', '.join(record)}")
        if not min_gap or record[SCORES[0]] - record[SCORES[1]] >= min_gap - ROUNDING:
            prompt = messages_from(_as_messages(record["prompt"], "user"))
            replies = [_reply(record[name], f"{key} '{path}', row {number}, '{name}'") for name in COLUMNS[1:]]
            found.append(Preference(prompt, *replies))
    return found


def _reply(value: Any, where: str) -> str:
    """The text of a reply, given as such or as a list of one assistant message."""
    messages: Sequence[Mapping[str, Any]] = _as_messages(value, "assistant")
    if len(messages) != 1 or messages[0].get("role") != "assistant":
        roles = ", ".join(str(message.get("role")) for message in messages) or "nothing"
        raise UserError(f"{where}: expected one assistant message, found {roles}")
    return str(messages[0].get("content") or "")


def _as_messages(value: Any, role: str) -> list[Mapping[str, Any]]:
    """Messages of a column that holds them, or a plain text in the given role."""
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _records(path: str, purpose: str, key: str) -> list[dict[str, Any]]:
    from upshot.tasks.datasets.tables import how_to_make, read_table

    if not Path(path).is_file():
        how = how_to_make(path) or f"make it with `upshot data prepare --for {purpose}`"
        raise UserError(f"{key}: there is no file '{path}'; {how}")
    records = read_table(Path(path))
    if not records:
        raise UserError(f"{key} '{path}' holds no rows")
    return records
