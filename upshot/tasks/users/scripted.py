"""A simulated user without a model: for offline work, tests and the quickstart."""

from __future__ import annotations

import re

from upshot.core.conversation import Conversation
from upshot.tasks.participants.base import Observation, User, users
from upshot.tasks.participants.templates import as_text

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


@users.register("scripted")
class ScriptedUser(User):
    """Says its lines one after another, then leaves.

    The lines are the row's `meta['script']`, else the option `lines`, else the sentences of the goal: a user that
    lets out one piece of what it wants in every message.
    """

    def __init__(self, lines: list[str] | None = None, leave_when_answered: bool = True) -> None:
        """Make the user; `leave_when_answered` ends the chat once the assistant's last message holds the reference."""
        self.lines, self.leave_when_answered = lines, leave_when_answered

    async def observe(self, conversation: Conversation) -> Observation:
        """The next line, or its leaving when no line is left or the answer has been given."""
        lines = conversation.row.meta.get("script") or self.lines or _sentences(as_text(conversation.row.goal))
        turns = conversation.session.get("user", {"turns": 0})["turns"]
        if turns >= len(lines) or (self.leave_when_answered and self._has_answer(conversation)):
            return self.reply("", {"user_ended": 1.0}, done=True)
        conversation.session["user"] = {"turns": turns + 1}
        return self.reply(str(lines[turns]), {"user_turns": 1.0})

    @staticmethod
    def _has_answer(conversation: Conversation) -> bool:
        reference, last = as_text(conversation.row.reference).strip(), conversation.last("assistant")
        if not reference or last is None:
            return False
        return re.search(rf"(?<!\w){re.escape(reference)}(?!\w)", last.content) is not None


def _sentences(text: str) -> list[str]:
    return [part.strip() for part in _SENTENCE_END.split(text) if part.strip()]
