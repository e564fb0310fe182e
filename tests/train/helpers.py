"""Helpers that a recipe names by path: a scripted user's model, and a metric that at times never returns."""

from __future__ import annotations

import asyncio
import json

from upshot.chat import Conversation, derive_seed
from upshot.models.base import Request
from upshot.rewards.metric import Metric
from upshot.score import Score


def customer(request: Request) -> str:
    """The user's answer in the form that the simulated user asks for."""
    return json.dumps({"current_answer": "none", "thought": "hm", "response": "not sure yet"})


class Flaky(Metric):
    """One, or for a quarter of the conversations never."""

    async def score(self, conversation: Conversation) -> Score:
        if derive_seed(conversation.seed, "hang") % 4 == 0:
            await asyncio.sleep(3600)
        return Score(1.0)
