"""Real conversations as a user's model learns from them and is compared with: rows of any chat file → `Transcript`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from upshot.core.conversation import Message, messages_from
from upshot.tasks.participants.templates import as_lines, as_text
from upshot.tasks.users.plain import END_MARK, swap_roles
from upshot.tasks.verifiers.base import BadRow

COLUMNS = ("messages", "conversation", "conversations")
GOALS = ("goal", "intent", "single_turn_prompt")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
"""Names of roles in ShareGPT's files."""


OUTCOME_PROMPT = "Did it end well for the user? Answer with one word, good or bad. This is what the user wanted:"
GOOD, BAD = "good", "bad"


@dataclass(frozen=True)
class Transcript:
    """What a user and an assistant said, in alternating turns, the user first."""

    messages: tuple[Message, ...]
    goal: str
    """What the user wanted, where the row says it (`goal`, `intent`); else its first words."""
    told: bool = False
    """Whether the row says it, so that the opening can be asked for, too."""
    persona: str = ""

    def to_dialogue(self) -> list[Message]:
        """The user's side, to be imitated: roles swapped, the goal before it, its leaving at the end."""
        *before, last = self.messages
        parted = replace(last, content=f"{last.content} {END_MARK}")
        whole = [*before, parted] if last.role == "user" else [*self.messages, Message("user", END_MARK)]
        return swap_roles(self.goal, whole)


def ask_outcome(goal: Any, messages: Sequence[Message]) -> list[Message]:
    """How a model is asked whether a conversation ended well: it answers with one of two words."""
    asked = f"{OUTCOME_PROMPT} {as_text(goal)}"
    return [Message("system", asked), Message("user", as_lines(messages))]


def transcript_of(record: Mapping[str, Any]) -> Transcript:
    """The conversation of a row; `BadRow` if user and assistant do not both speak in it.

    Columns: `messages` (or `conversation`, `conversations`) with role and content, or ShareGPT's from and value.
    """
    listed = next((record[name] for name in COLUMNS if isinstance(record.get(name), list | tuple)), None)
    if listed is None:
        raise BadRow(f"no {' or '.join(COLUMNS)}")
    messages = [_message(item) for item in listed if isinstance(item, Mapping)]
    spoken: list[Message] = []
    for message in messages:
        if message.role not in ("user", "assistant") or not message.content.strip():
            continue
        if spoken and spoken[-1].role == message.role:  # two in a row are one turn
            spoken[-1] = replace(spoken[-1], content=f"{spoken[-1].content}\n{message.content}")
        elif spoken or message.role == "user":
            spoken.append(message)
    if not any(message.role == "assistant" for message in spoken):
        raise BadRow("no turn of a user and of an assistant")
    goal = next((as_text(record[name]) for name in GOALS if record.get(name)), "")
    return Transcript(tuple(spoken), goal or spoken[0].content, bool(goal), str(record.get("persona") or ""))


def _message(item: Mapping[str, Any]) -> Message:
    role = str(item.get("role") or item.get("from") or "")
    content = item.get("content") if "content" in item else item.get("value")
    text = content if isinstance(content, str) else ""
    return messages_from([{"role": _ROLES.get(role, role), "content": text}])[0]
