"""A simulated user played by a model that was trained to be one: it just speaks, and ends with a mark.

The model sees the goal as a system prompt and the conversation with the roles swapped: what the assistant said stands
as the user's words, and what it is to say next is the assistant's turn. No JSON and no thought is asked of it, so a
small model can do it, once it was fine-tuned on the user's side of conversations (`swap_roles` makes those dialogues).

Where the task gives the user tools (`Task.user_tools`), the model calls them as a policy does, as often as it wants
before it speaks; it sees what came of its calls, and the policy does not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from upshot.config.bounds import Count, NonNegative, Share, Whole, Words
from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, derive_seed
from upshot.core.errors import UserError
from upshot.models.base import Model, ModelCallError, Request
from upshot.tasks.base import Task
from upshot.tasks.participants.base import Observation, User, find_model, users
from upshot.tasks.participants.dual import act_as_user
from upshot.tasks.participants.templates import as_text
from upshot.tasks.participants.tools import calls_of
from upshot.tasks.users.noise import mistype
from upshot.tasks.users.personas import check_persona, choose_persona

END_MARK = "[END]"
PROMPT = "You are a person who talks to an assistant. This is what you know and want: {goal}"
_SWAPPED = {"user": "assistant", "assistant": "user"}


def swap_roles(goal: Any, messages: Sequence[Message], prompt: str = PROMPT) -> list[Message]:
    """A conversation as the user's model sees it: the goal, then what was said with the roles swapped."""
    spoken = [replace(message, role=_SWAPPED[message.role]) for message in messages if message.role in _SWAPPED]
    return [Message("system", prompt.replace("{goal}", as_text(goal))), *spoken]


def with_acts(conversation: Conversation) -> list[Message]:
    """The conversation as the user sees it: before each of its messages, its tool calls and their results."""
    out: list[Message] = []
    for turn in conversation.turns:
        for act in turn.note.get("acts", ()) if turn.message.role == "user" else ():
            called = json.dumps({"name": act["name"], "arguments": act["arguments"]}, ensure_ascii=False)
            out += [Message("user", f"<tool_call>{called}</tool_call>"), Message("assistant", _answer(act))]
        out.append(turn.message)
    return out


def _answer(act: Mapping[str, Any]) -> str:
    return f"[{act['name']}] {act['answer']}"


@users.register("plain")
class PlainUser(User):
    """A model that speaks as the user does, in plain text."""

    def __init__(
        self,
        model: Any = "user",
        models: Mapping[str, Model] | None = None,
        prompt: Words = PROMPT,
        end_mark: Words | list[Words] = END_MARK,
        temperature: NonNegative = 1.0,
        max_tokens: Count = 128,
        persona: str | list[str] = "",
        noise: Share = 0.0,
        seed: Whole = 0,
        task: Task | None = None,
    ) -> None:
        """Make the user.

        model: a `Model`, or the name of one among the recipe's `models`.
        prompt: the system prompt, with {goal} as the placeholder of the row's goal.
        end_mark: what the model writes to leave, or a list of such marks; the rest of that message is still said.
        persona: as for 'llm': a name, 'mixed', a list to draw from by row, or a description in words; '': none.
        noise: share of words that it mistypes.
        seed: seed for drawing personas.
        """
        if "{goal}" not in prompt:
            raise UserError(f"the prompt of the user 'plain' does not contain {{goal}}: '{prompt}'")
        self.model = find_model("the user 'plain'", model, models or {})
        check_persona(persona)
        self.prompt, self.persona, self.noise, self.seed, self.task = prompt, persona, noise, seed, task
        self.end_marks = [end_mark] if isinstance(end_mark, str) else end_mark
        self.sampling = Sampling(max_tokens=max_tokens, temperature=temperature)

    async def observe(self, conversation: Conversation) -> Observation:
        """The user's next message, or its leaving; `ModelCallError` when the model says nothing."""
        name, person = choose_persona(self.persona, conversation.row, self.seed)
        tools = self.task.part(conversation.row).user_tools() if self.task is not None else None
        described = tools.describe() if tools is not None else ""
        prompt = "\n\n".join(filter(None, (self.prompt, described, person)))
        shown = swap_roles(conversation.row.goal, with_acts(conversation), prompt)
        text = await self._speak(shown, conversation)
        acts: list[dict[str, Any]] = []
        while tools is not None and (calls := calls_of(Message("assistant", text))):
            new = await act_as_user(tools, calls, conversation, len(acts))
            acts += new
            shown += [Message("assistant", text), Message("user", "\n".join(map(_answer, new)))]
            text = await self._speak(shown, conversation, len(acts))
        ended = any(mark in text for mark in self.end_marks)
        for mark in self.end_marks:
            text = text.replace(mark, "")
        text = text.strip()
        if self.noise:
            text = mistype(text, self.noise, random.Random(derive_seed(conversation.seed, "noise", len(shown))))
        if not text and not ended:
            self._counts.update({"user_failed": 1.0})
            raise ModelCallError("user empty", "the user's model wrote nothing and did not end the conversation")
        metrics = {"user_turns": 1.0, "user_ended": float(ended), **({"user_acts": float(len(acts))} if acts else {})}
        note = {**({"acts": acts} if acts else {}), **({"persona": name} if person else {})}
        return self.reply(text, metrics, note, ended)

    async def _speak(self, shown: Sequence[Message], conversation: Conversation, acts: int = 0) -> str:
        # The first call of a turn has the seed it would have without tools.
        seed = derive_seed(conversation.seed, "user", len(conversation.turns), *[acts] * bool(acts))
        request = Request(list(shown), replace(self.sampling, seed=seed), role="user")
        (completion,) = await self.model.generate(request)
        return completion.text
