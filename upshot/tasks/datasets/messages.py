"""A column of messages, or a plain text → messages. Invalid messages are refused with an error that names the fault."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from upshot.core.conversation import Message, text_of
from upshot.core.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
LONE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair: JSON may contain it, but UTF-8 cannot encode it, so no tokenizer accepts it."""


def messages_of(value: Any, role: str = "user", where: str = "messages") -> tuple[Message, ...]:
    """The messages of a column, or a plain text as one message of the role; `where` names the column in errors."""
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    if is_empty(value) or isinstance(value, Mapping | int | float):
        raise UserError(f"{where}: expected text or messages, found {describe(value)}")
    return tuple(_message(facts(item), value, where) for item in value)


def _message(data: Mapping[str, Any], value: Any, where: str) -> Message:
    if "role" not in data:
        raise UserError(f"{where}: messages are objects with 'role' and 'content', not {str(value)[:100]}")
    if data["role"] not in ROLES:
        raise UserError(f"{where}: unknown role {data['role']!r}; the roles are {', '.join(ROLES)}")
    content = None if is_empty(data.get("content")) else data["content"]
    if content is None and not data.get("tool_calls") and data["role"] != "tool":
        raise UserError(f"{where}: a message of role '{data['role']}' has no content")
    text = text_of(content, where)
    if half := LONE.search(text):
        raise UserError(f"{where}: \\u{ord(half[0]):x} is half of a character (a lone surrogate); write the whole one")
    return Message.from_dict({**data, "content": text})


def is_empty(value: Any) -> bool:
    """Whether a cell is empty: null, or NaN, which pandas writes for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def describe(value: Any) -> str:
    """The value of a cell that should hold text, for a message."""
    return "null" if value is None else f"{str(value)[:40]} ({type(value).__name__})"


def facts(value: Any) -> dict[str, Any]:
    """A nested column as a dictionary; in files it is a struct or JSON text."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return {"text": value}
    return dict(value) if isinstance(value, Mapping) else {}


def is_dialogue(value: Any) -> bool:
    """Whether a value is a list of messages that ends with the assistant's."""
    last = value[-1] if isinstance(value, list) and value else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"
