"""Helpers that a recipe names by import path: a scripted user's model, and metrics that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, derive_seed
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.models.base import Model, Request
from upshot.models.scripted import last_text
from upshot.rewards.metric import Metric


def customer(request: Request) -> str:
    """The user's answer in the format that the simulated user expects."""
    return json.dumps({"current_answer": "none", "thought": "hm", "response": "not sure yet"})


class Flaky(Metric):
    """One, or for a quarter of the conversations it never returns."""

    async def score(self, conversation: Conversation) -> Score:
        if derive_seed(conversation.seed, "hang") % 4 == 0:
            await asyncio.sleep(3600)
        return Score(1.0)


class Odd(Metric):
    """A NumPy number, with a detail that JSON cannot represent."""

    async def score(self, conversation: Conversation) -> Score:
        return Score(np.float32(0.5), detail={"seen": {1, 2}, "what": object(), "half": "\ud83d"})  # type: ignore[arg-type]


class NoMapping(Metric):
    """A score whose detail is not even a mapping."""

    async def score(self, conversation: Conversation) -> Score:
        return Score(0.0, detail="text")  # type: ignore[arg-type]


class Lottery(Metric):
    """A number that depends only on the conversation's seed, so that there is always something to learn."""

    async def score(self, conversation: Conversation) -> Score:
        return Score(derive_seed(conversation.seed, "lottery") % 100 / 100)


class HalfFlat(Lottery):
    """The same, but all conversations of every other row score alike; one row cannot be judged."""

    async def score(self, conversation: Conversation) -> Score:
        number = derive_seed(0, conversation.row.id)
        if number % 32 == 1:
            return Score.missing(Reason.CONNECTION)
        return Score(0.5) if number % 2 else await super().score(conversation)


class CopyState(Metric):
    """Which state of a copy of the policy judges, and the start of its text; slower if a test asks for it."""

    slow: ClassVar[Callable[[int], float]] = lambda seed: 0.0

    def __init__(self, judge: Model) -> None:
        self.judge = judge

    async def score(self, conversation: Conversation) -> Score:
        await asyncio.sleep(type(self).slow(conversation.seed))
        sampling = Sampling(max_tokens=6, temperature=1.0, seed=conversation.seed)
        (said,) = await self.judge.generate(Request([Message("user", "a lamp")], sampling))
        return Score(said.version + derive_seed(0, said.text) % 1000 / 1e6)


def monitor(request: Request) -> str:
    """Trusts thoughts that calculate, and fails on those that are empty phrases."""
    shown = last_text(request)
    return json.dumps({"thought": "it calculates" if "=" in shown else "?", "score": float("=" in shown)})


class Sometimes(Metric):
    """One, or for some conversations not a number."""

    async def score(self, conversation: Conversation) -> Score:
        return float("nan") if derive_seed(conversation.seed, "nan") % 2 else 1.0  # type: ignore[return-value]


class BreaksOnOneRank(Metric):
    """A number that depends on the seed, until rank 1 fails, while it plays or while it learns."""

    calls = 0

    async def score(self, conversation: Conversation) -> Score:
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls > 40:
            if os.environ["UPSHOT_TEST_BREAKS"] == "play":
                raise UserError("this rank is broken")
            from upshot.training.learner.learner import Learner

            Learner.step = _broken  # type: ignore[assignment]
        return Score(derive_seed(conversation.seed, "lottery") % 100 / 100)


def _broken(*_: object) -> None:
    raise RuntimeError("this rank is broken")
