"""What an external program gets to play an episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from upshot.core.conversation import Row


@dataclass(frozen=True, slots=True)
class AgentEpisode:
    """One conversation, and where its policy is: at an OpenAI address that nobody else has."""

    row: Row
    base_url: str
    """For any client of OpenAI's chat API."""
    api_key: str
    model: str
    """The name to ask for."""
    reward_url: str
    """POST {"reward": 0.5} here, with the header `Authorization: Bearer REWARD_KEY`."""
    reward_key: str

    def to_dict(self) -> dict[str, Any]:
        """As a program reads it from its standard input."""
        row = self.row
        access = {name: getattr(self, name) for name in ("base_url", "api_key", "model", "reward_url", "reward_key")}
        messages = [message.to_dict() for message in row.messages]
        fields = {"goal": row.goal, "reference": row.reference, "source": row.source, "meta": dict(row.meta)}
        return {**access, "row": {"id": row.id, "messages": messages, **fields}}


AgentFunction = Callable[[AgentEpisode], Any]
"""Plays an episode, sync or async; what it returns is the reward, None: the task says what it is worth."""
