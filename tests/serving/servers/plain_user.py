"""A simulated user that says whatever its models generate, so that even tiny models will do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, derive_seed
from upshot.models.base import Model, Request
from upshot.tasks.participants.base import Observation, User


class PlainUser(User):
    """Uses one of the models for each conversation."""

    def __init__(self, asks: Sequence[str], models: Mapping[str, Model]) -> None:
        super().__init__()
        self.models = [models[name] for name in asks]

    async def observe(self, conversation: Conversation) -> Observation:
        """Ask for a few words."""
        model = self.models[conversation.seed % len(self.models)]
        seed = derive_seed(conversation.seed, "user", len(conversation.turns))
        said = await model.generate(Request(tuple(conversation.messages), Sampling(6, seed=seed), role="user"))
        return Observation((Message("user", said[0].text),))
