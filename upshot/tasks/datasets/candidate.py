"""One candidate reply: a row of the published multi-turn sets, or of any prompt/completion (or messages) file.

`parse` is strict about what it takes and says why it refuses: the reasons are counted in the summary.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from upshot.core.conversation import Message, messages_from
from upshot.tasks.datasets.collabllm_goals import plain

ROLES = ("system", "user", "assistant", "tool")


class UnusableRecord(Exception):
    """A record that cannot become a candidate; the message is the reason, short and countable."""


@dataclass(frozen=True)
class Candidate:
    """A reply that was tried at one turn of a conversation, and what came of it."""

    history: tuple[Message, ...]
    """What was said before; ends with the user, has no system message."""
    completion: str
    conv_id: str
    """'' when the record names no conversation."""
    score: float | None
    """Mean multiturn-aware reward; None when it is missing."""
    goal: str
    """The hidden goal; '' when the record has none."""
    reference: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The single-turn set's other columns: unit tests, level, tags."""
    system: str = ""
    """The record's own system message."""
    sessions: Sequence[Any] = ()
    """The futures behind the score, as transcripts; none where the record holds none."""
    rewards: Mapping[str, Any] = field(default_factory=dict)
    """What each metric gave each of them."""

    @property
    def turn(self) -> int:
        """Length of the history: 1, 3, 5 …"""
        return len(self.history)

    def measured(self, name: str) -> float | None:
        """`score`, or the mean of a metric over the futures that have a value; None when it is missing."""
        if name == "score":
            return self.score
        given = self.rewards.get(name.removeprefix("rewards."))
        numbers = map(_number, given if isinstance(given, list) else [given])
        values = [number for number in numbers if number is not None]
        return sum(values) / len(values) if values else None

    @cached_property
    def goal_key(self) -> str:
        """By what rows are held together in a split: the goal, else the conversation, else its opening."""
        if self.goal:
            return "goal:" + plain(self.goal)
        if self.conv_id:
            return "conv:" + self.conv_id
        return "open:" + plain(self.history[0].content)

    @cached_property
    def place(self) -> bytes:
        """A digest of where the reply was tried: the goal and every word before it."""
        said = [plain(self.goal), *(part for m in self.history for part in (m.role, m.content.strip()))]
        return hashlib.blake2b("\0".join(said).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def parse(record: Mapping[str, Any]) -> Candidate:
    """A candidate from a record; `UnusableRecord` with the reason when it cannot be one."""
    said, completion = _spoken(record)
    if any(m.tool_calls or m.role == "tool" for m in said):
        raise UnusableRecord("tool calls, which these formats do not hold")
    history = tuple(m for m in said if m.role != "system")
    if not history or history[-1].role != "user":
        raise UnusableRecord("prompt does not end with the user")
    if not completion.strip():
        raise UnusableRecord("empty completion")
    conv_id = record.get("conv_id")
    return Candidate(
        history=history,
        completion=completion,
        conv_id="" if conv_id is None else str(conv_id),
        score=_number(record.get("score")),
        goal=_text(record.get("single_turn_prompt", record.get("goal"))),
        reference=_text(record.get("single_turn_completion", record.get("reference"))),
        metadata=_mapping(record.get("single_turn_metadata")),
        system="\n".join(m.content for m in said if m.role == "system"),
        sessions=record.get("sessions") or (),
        rewards=_mapping(record.get("rewards")),
    )


def _spoken(record: Mapping[str, Any]) -> tuple[tuple[Message, ...], str]:
    """History and completion from `prompt`/`completion`, or from whole `messages`."""
    if record.get("prompt") is not None and record.get("completion") is not None:
        said = _messages(record["completion"], "assistant")
        if len(said) != 1 or said[0].role != "assistant":
            raise UnusableRecord("completion is not one assistant message")
        return _messages(record["prompt"], "user"), said[0].content
    whole = record.get("messages") or record.get("prompt")  # the verl recipe's sft files call it prompt
    if whole and not isinstance(whole, str):
        said = _messages(whole, "user")
        if said[-1].role != "assistant":
            raise UnusableRecord("messages do not end with the assistant")
        return said[:-1], said[-1].content
    raise UnusableRecord("no prompt and completion")


def _messages(value: Any, role: str) -> tuple[Message, ...]:
    """Messages from a list of dictionaries, or one message of the role from a string."""
    if isinstance(value, str):
        return (Message(role, value),)
    if not isinstance(value, list) or not all(isinstance(m, Mapping) for m in value):
        raise UnusableRecord("messages are not a list of role and content")
    for message in value:
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise UnusableRecord("messages are not a list of role and content")
    return messages_from(value)


def _number(value: Any) -> float | None:
    """A finite score, else None: a missing score is not zero."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _mapping(value: Any) -> Mapping[str, Any]:
    """Metadata as a mapping; published files hold it as a struct, ours as JSON text."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return {"text": value}
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True)
class CandidatePair:
    """Two replies to the same history, of which the first led further."""

    chosen: Candidate
    rejected: Candidate
