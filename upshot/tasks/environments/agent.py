"""What an external program needs to play an episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from upshot.core.conversation import Row


@dataclass(frozen=True, slots=True)
class AgentEpisode:
    """One conversation, and the OpenAI address of its policy, which no other conversation has."""

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
        """The JSON object that a program reads from its standard input."""
        row = self.row
        access = {name: getattr(self, name) for name in ("base_url", "api_key", "model", "reward_url", "reward_key")}
        messages = [message.to_dict() for message in row.messages]
        fields = {"goal": row.goal, "reference": row.reference, "source": row.source, "meta": dict(row.meta)}
        return {**access, "row": {"id": row.id, "messages": messages, **fields}}


AgentFunction = Callable[[AgentEpisode], Any]
"""Plays an episode, sync or async; returns the reward, or None to let the task score it."""
