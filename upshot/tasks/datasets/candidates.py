"""One candidate reply: a row of the published multi-turn sets, or of any prompt/completion (or messages) file.

`candidate_of` is strict about what it accepts, and says why it refuses: the reasons are counted in the summary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.tasks.datasets.messages import facts, messages_of
from upshot.tasks.datasets.records import GOAL, REFERENCE, first
from upshot.tasks.datasets.splits import plain
from upshot.tasks.verifiers.base import BadRow, as_json_text


@dataclass(frozen=True)
class Candidate:
    """A reply that was tried at one turn of a conversation, and its outcome."""

    history: tuple[Message, ...]
    """What was said before; ends with the user, has no system message."""
    completion: str
    conv_id: str
    """'' if the record names no conversation."""
    score: float | None
    """Mean multiturn-aware reward; None if it is missing."""
    goal: str
    """The hidden goal; '' if the record has none."""
    reference: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The single-turn set's other columns: unit tests, level, tags."""
    system: str = ""
    """The record's own system message."""
    sessions: Sequence[Any] = ()
    """The futures behind the score, as transcripts, if the record has them."""
    rewards: Mapping[str, Any] = field(default_factory=dict)
    """The value of each metric for each of them."""

    @property
    def turn(self) -> int:
        """Length of the history: 1, 3, 5 …"""
        return len(self.history)

    def mean_of(self, name: str) -> float | None:
        """`score`, or the mean of a metric over the futures that have a value; None if it is missing."""
        if name == "score":
            return self.score
        values_of = self.rewards.get(name.removeprefix("rewards."))
        numbers = map(_number, values_of if isinstance(values_of, list) else [values_of])
        values = [number for number in numbers if number is not None]
        return sum(values) / len(values) if values else None

    @cached_property
    def goal_key(self) -> str:
        """The key that keeps rows in the same split: the goal, else the conversation, else its opening."""
        if self.goal:
            return "goal:" + plain(self.goal)
        return "conv:" + self.conv_id if self.conv_id else "open:" + plain(self.history[0].content)

    @cached_property
    def place(self) -> bytes:
        """A digest of the goal and of everything said before the reply."""
        parts = [plain(self.goal), *(part for m in self.history for part in (m.role, m.content.strip()))]
        return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True)
class CandidatePair:
    """Two replies to the same history, of which the first had the better outcome."""

    chosen: Candidate
    rejected: Candidate


def goal_groups(candidates: Sequence[Candidate]) -> list[str]:
    """The group of each candidate: candidates that share a goal or a conversation share a group."""
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for candidate in candidates:
        goal = root(candidate.goal_key)
        if candidate.conv_id:  # the rows of a conversation stay together even if their goals differ
            conv = root("conv:" + candidate.conv_id)
            parent[max(goal, conv)] = min(goal, conv)
    return [root(candidate.goal_key) for candidate in candidates]


def candidate_of(record: Mapping[str, Any], goal_alone: bool = False) -> Candidate:
    """A candidate from a record; `BadRow` with the reason if it cannot be one.

    goal_alone: also accept a record with a goal and no messages: the simulated user opens it, and it has no reply.
    verl's RL parquet keeps the other columns of a published set in `extra_info`, the goal one level deeper.
    """
    extra = facts(record.get("extra_info"))
    record = {**facts(extra.get("interaction_kwargs")), **extra, **record}
    goal = _text(first(record, GOAL))
    unsaid = goal_alone and goal and not any(record.get(name) for name in ("prompt", "messages"))
    messages, completion = ((), "") if unsaid else _history_and_reply(record)
    if any(m.tool_calls or m.role == "tool" for m in messages):
        raise BadRow("tool calls, which these formats do not hold")
    history = tuple(m for m in messages if m.role != "system")
    if not unsaid and (not history or history[-1].role != "user"):
        raise BadRow("prompt does not end with the user")
    if not unsaid and not completion.strip():
        raise BadRow("empty completion")
    conv_id = record.get("conv_id")
    return Candidate(
        history=history,
        completion=completion,
        conv_id="" if conv_id is None else str(conv_id),
        score=_number(record.get("score")),
        goal=goal,
        reference=_text(first(record, REFERENCE)),
        metadata=facts(record.get("single_turn_metadata")),
        system="\n".join(m.content for m in messages if m.role == "system"),
        sessions=record.get("sessions") or (),
        rewards=facts(record.get("rewards")),
    )


def _history_and_reply(record: Mapping[str, Any]) -> tuple[tuple[Message, ...], str]:
    """History and completion from `prompt`/`completion`, or from whole `messages`."""
    if record.get("prompt") is not None and record.get("completion") is not None:
        messages = _messages(record["completion"], "assistant")
        if len(messages) != 1 or messages[0].role != "assistant":
            raise BadRow("completion is not one assistant message")
        return _messages(record["prompt"], "user"), messages[0].content
    whole = record.get("messages") or record.get("prompt")  # the verl recipe's sft files call it prompt
    if whole and not isinstance(whole, str):
        messages = _messages(whole, "user")
        if messages[-1].role != "assistant":
            raise BadRow("messages do not end with the assistant")
        return messages[:-1], messages[-1].content
    raise BadRow("no prompt and completion")


def _messages(value: Any, role: str) -> tuple[Message, ...]:
    try:
        return messages_of(value, role)
    except UserError as error:
        raise BadRow(str(error)) from None


def _number(value: Any) -> float | None:
    """A finite score, else None: a missing score is not zero."""
    with suppress(ValueError):
        if isinstance(value, int | float | str) and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    return None


def _text(value: Any) -> str:
    return "" if value is None else as_json_text(value)
