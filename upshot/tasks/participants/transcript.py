"""A conversation as lines of text, for the prompts of simulated users and judges. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from upshot.core.conversation import Conversation, Message

NAMES = {"user": "User", "assistant": "Assistant", "tool": "Tool"}


def as_lines(messages: Sequence[Message], names: Mapping[str, str] = NAMES) -> str:
    """Who said what, a paragraph each; system messages are nobody's words and are left out."""
    said = [f"{names.get(m.role, m.role)}: {m.content.strip()}" for m in messages if m.role != "system"]
    return "\n\n".join(said)


def as_text(value: Any) -> str:
    """A goal or a reference as text: messages as lines, other structures as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(v, Message) for v in value):
        return as_lines(value)
    if isinstance(value, list | tuple) and value and all(isinstance(v, Mapping) and "role" in v for v in value):
        return as_lines([Message.from_dict(v) for v in value])
    return json.dumps(value, ensure_ascii=False, default=str)


def task_of(conversation: Conversation, fallback: str) -> str:
    """What the conversation is about, in the row's own words (`task_desc`) where it has any."""
    return str(conversation.row.meta.get("task_desc") or fallback)
