"""Conversations on disk → rows and replies, whatever the file calls its columns. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upshot.core.conversation import Conversation, Message, Row, derive_seed, messages_from
from upshot.core.errors import UserError

GOAL = ("goal", "single_turn_prompt", "question", "problem")
REFERENCE = ("reference", "single_turn_completion", "ground_truth", "answer", "solution")
REPLIES = ("completion", "reply", "completions", "replies")
OPENING = ("prompt", "raw_prompt")
WHOLE = ("messages", "conversation")


@dataclass(frozen=True)
class Record:
    """A row with the replies to it, or with the whole conversation that followed."""

    row: Row
    replies: tuple[str, ...] = ()
    said: tuple[Message, ...] = ()
    """What was said after the row's opening, when the record holds a whole conversation."""

    def conversations(self, seed: int = 0) -> list[Conversation]:
        """The conversations to score; each ends with the reply."""
        endings: list[tuple[Message, ...]] = [(Message("assistant", text),) for text in self.replies] or [self.said]
        out = []
        for index, ending in enumerate(endings):
            conversation = Conversation(self.row, derive_seed(seed, self.row.id, index), f"{self.row.id}#{index}")
            for message in ending:
                conversation.say(message)
            out.append(conversation)
        return out


def read_records(rows: Sequence[Mapping[str, Any]], futures: bool = False) -> list[Record]:
    """Records from the rows of a file.

    A row has `prompt` and `completion` (a text, or a list of them), or `messages`: a whole conversation. The latter is
    scored as it stands; with `futures` only its last assistant turn is the reply, and what came after it is dropped.
    """
    ids = [str(row.get("id", index)) for index, row in enumerate(rows)]
    if len(set(ids)) < len(ids):
        ids = [str(index) for index in range(len(rows))]
    return [_record(row, name, number, futures) for number, (name, row) in enumerate(zip(ids, rows, strict=True), 1)]


def _record(data: Mapping[str, Any], name: str, number: int, futures: bool) -> Record:
    opening, replies, whole = (_first(data, keys) for keys in (OPENING, REPLIES, WHOLE))
    if opening is not None and replies is not None:
        texts = [replies] if isinstance(replies, str) else list(replies)
        return Record(_row(data, name, _messages(opening)), replies=tuple(_reply_text(text) for text in texts))
    if whole is None:
        raise UserError(
            f"row {number} has neither 'prompt' and 'completion' nor 'messages'; it has {', '.join(sorted(data))}"
        )
    messages = _messages(whole)
    spoken = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not spoken:
        raise UserError(f"row {number}: nobody answers in this conversation; there is no assistant message to score")
    if futures:
        cut = spoken[-1]
        return Record(_row(data, name, messages[:cut]), said=(messages[cut],))
    return Record(_row(data, name, messages[: spoken[0]]), said=messages[spoken[0] :])


def _row(data: Mapping[str, Any], name: str, opening: tuple[Message, ...]) -> Row:
    extra = _mapping(data.get("extra_info"))
    deeper = _mapping(extra.get("interaction_kwargs"))
    judged = _mapping(data.get("reward_model"))
    goal, reference = _first(data, GOAL), _first(data, REFERENCE)
    meta = {**_mapping(data.get("single_turn_metadata")), **_mapping(data.get("meta")), **deeper}
    return Row(
        name,
        opening,
        goal if goal is not None else _first(deeper, GOAL),
        reference if reference is not None else _first(judged, REFERENCE),
        str(data.get("data_source", data.get("source", ""))),
        meta,
    )


def _messages(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message("user", value),)
    return messages_from([_mapping(item) for item in value])


def _reply_text(value: Any) -> str:
    """A reply is text, or a message (or a list that ends with one)."""
    if isinstance(value, list) and value:
        value = value[-1]
    return value if isinstance(value, str) else str(_mapping(value).get("content", ""))


def _first(data: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((data[key] for key in keys if data.get(key) is not None), None)


def _mapping(value: Any) -> Mapping[str, Any]:
    """A nested field as a mapping; parquet files often hold it as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, Mapping) else {}
