"""A metric, named by import path in a recipe, that calls every helper model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, derive_seed
from upshot.core.score import Score
from upshot.models.base import Model, Request
from upshot.rewards.metric import Metric


class Poll(Metric):
    """The share of helper models whose text begins with an even id."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self.models = models

    async def score(self, conversation: Conversation) -> Score:
        words = [turn.message for turn in conversation.turns][-1].content.split()[:3]
        seed = derive_seed(conversation.seed, "poll")
        request = Request([Message("user", " ".join(words) or "book")], Sampling(max_tokens=6, seed=seed))
        answers = await asyncio.gather(*(model.generate(request) for model in self.models.values()))
        ids = [token for (answer,) in answers for token in answer.ids or ()]
        return Score(sum(token % 2 == 0 for token in ids) / len(ids), detail={"ids": ids})
