"""A simulated user played by a model that was trained to be one: it just speaks, and ends with a mark.

The model sees the goal as a system prompt and the conversation with the roles swapped: what the assistant said stands
as the user's words, and what it is to say next is the assistant's turn. No JSON and no thought is asked of it, so a
small model can do it, once it was fine-tuned on the user's side of conversations (`swap_roles` makes those dialogues).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from upshot.config.bounds import Count, NonNegative, Words
from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, derive_seed
from upshot.core.errors import UserError
from upshot.models.base import Model, ModelCallError, Request
from upshot.tasks.participants.base import Observation, User, find_model, users
from upshot.tasks.participants.templates import as_text

END_MARK = "[END]"
PROMPT = "You are a person who talks to an assistant. This is what you know and want: {goal}"
_SWAPPED = {"user": "assistant", "assistant": "user"}


def swap_roles(goal: Any, messages: Sequence[Message], prompt: str = PROMPT) -> list[Message]:
    """A conversation as the user's model sees it: the goal, then what was said with the roles swapped."""
    spoken = [replace(message, role=_SWAPPED[message.role]) for message in messages if message.role in _SWAPPED]
    return [Message("system", prompt.replace("{goal}", as_text(goal))), *spoken]


@users.register("plain")
class PlainUser(User):
    """A model that speaks as the user does, in plain text."""

    def __init__(
        self,
        model: Any = "user",
        models: Mapping[str, Model] | None = None,
        prompt: Words = PROMPT,
        end_mark: Words = END_MARK,
        temperature: NonNegative = 1.0,
        max_tokens: Count = 128,
    ) -> None:
        """Make the user.

        model: a `Model`, or the name of one among the recipe's `models`.
        prompt: the system prompt, with {goal} where the row's goal stands.
        end_mark: what the model writes to leave; the rest of that message is said.
        """
        if "{goal}" not in prompt:
            raise UserError(f"the prompt of the user 'plain' says nowhere {{goal}}: '{prompt}'")
        self.model = find_model("plain", model, models or {})
        self.prompt = prompt
        self.end_mark = end_mark
        self.sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
        super().__init__()

    async def observe(self, conversation: Conversation) -> Observation:
        """The user's next message, or its leaving; `ModelCallError` when the model says nothing."""
        seed = derive_seed(conversation.seed, "user", len(conversation.turns))
        shown = swap_roles(conversation.row.goal, conversation.messages, self.prompt)
        request = Request(shown, replace(self.sampling, seed=seed), role="user")
        (completion,) = await self.model.generate(request)
        ended = self.end_mark in completion.text
        said = completion.text.replace(self.end_mark, "").strip()
        if not said and not ended:
            self._counts.update({"user_failed": 1.0})
            raise ModelCallError("user empty", "the user's model said nothing and did not leave")
        metrics = {"user_turns": 1.0, "user_ended": float(ended)}
        self._counts.update(metrics)
        messages = (Message("user", said),) if said else ()
        return Observation(messages, done=ended, reason="user", metrics=metrics)
