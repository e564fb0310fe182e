"""A participant answers the policy: a simulated user, an environment, a tool.

One participant object serves all conversations at once, so it has no state: everything that belongs to a conversation
is in `conversation.session`, `.row` and `.rng`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from upshot.config.registry import Registry
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError, did_you_mean
from upshot.core.helper import Helper
from upshot.core.score import Score
from upshot.models.base import Model


@dataclass(frozen=True, slots=True)
class Observation:
    """A participant's answer to a policy turn."""

    messages: tuple[Message, ...] = ()
    """The next messages, in proper chat roles; empty if there is nothing to add."""
    done: bool = False
    """Whether the conversation ends here."""
    reason: str = "done"
    """Why it ends: 'user' (the user left), 'answered', 'finished' …"""
    note: Mapping[str, Any] = field(default_factory=dict)
    """Hidden thoughts and flags, kept with the turn for the reader; never rendered."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to add up over the conversation, such as {'format_errors': 1}."""
    score: Score | None = None
    """The score of the policy's turn itself, with credit by turns; None: no score."""


class Participant(Helper, ABC):
    """Someone who takes turns with the policy."""

    forks: bool = True
    """Whether its state of a conversation is copied with the conversation, so that futures can continue it."""

    def answers_calls(self, row: Row | None = None) -> bool:
        """Whether it answers the policy's tool calls: in conversations with this row, or (None) in any at all."""
        return False

    async def start(self, conversation: Conversation) -> None:
        """Prepare the session of one conversation; may say opening messages."""

    @abstractmethod
    async def observe(self, conversation: Conversation) -> Observation:
        """Answer the policy's last turn."""

    async def end(self, conversation: Conversation) -> None:
        """Finish the session; an environment writes its final score to `conversation.score`."""


class User(Participant):
    """A simulated user: opens the conversation if it is empty, and counts what it does."""

    @cached_property
    def _counts(self) -> Counter[str]:
        return Counter()

    def reply(
        self, text: str, metrics: Mapping[str, float], note: Mapping[str, Any] | None = None, done: bool = False
    ) -> Observation:
        """What the user says, counted; with `done` it leaves."""
        self._counts.update(metrics)
        messages = (Message("user", text),) if text else ()
        return Observation(messages, done=done, reason="user", note=note or {}, metrics=metrics)

    async def start(self, conversation: Conversation) -> None:
        """Say the opening message if no one has spoken yet."""
        if not any(message.role in ("user", "assistant") for message in conversation.messages):
            observation = await self.observe(conversation)
            conversation.count(observation.metrics)
            for message in observation.messages:
                conversation.say(message, note=observation.note)
            if observation.done:
                conversation.ended = observation.reason

    def stats(self) -> dict[str, float]:
        """Totals since the start."""
        return {name: float(value) for name, value in sorted(self._counts.items())}

    def state(self) -> dict[str, Any]:
        """The counters."""
        return dict(self._counts)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue counting from a saved state."""
        self._counts = Counter(state)


users: Registry[Participant] = Registry("user", "upshot.tasks.users", "upshot.tasks.participants", base=Participant)
"""Simulated users that a recipe can name in `futures.user`."""


def find_model(who: str, model: Any, models: Mapping[str, Model]) -> Model:
    """The model that plays a participant: one of the recipe's models by name, or a `Model`."""
    if isinstance(model, Model):
        return model
    if not isinstance(model, str) or model not in models:
        way_out = did_you_mean(str(model), models) if models else f"add models.{model}: …"
        why = "which the recipe does not define" if models else "but the recipe defines no models"
        raise UserError(f"{who} is played by the model '{model}', {why}; {way_out}")
    return models[model]
