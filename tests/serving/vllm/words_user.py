"""A simulated user that says whatever its model generates, so that a model of random weights will do."""

from __future__ import annotations

from collections.abc import Mapping

from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, derive_seed
from upshot.models.base import Model, Request
from upshot.tasks.participants.base import Observation, User


class WordsUser(User):
    """Says what the model 'user' generates."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        super().__init__()
        self.model = models["user"]

    async def observe(self, conversation: Conversation) -> Observation:
        seed = derive_seed(conversation.seed, "user", len(conversation.turns))
        [said] = await self.model.generate(Request(tuple(conversation.messages), Sampling(5, seed=seed), role="user"))
        return Observation((Message("user", said.text),))
