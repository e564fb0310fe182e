"""The proactive prompt in CollabLLM's own form: one request that shows the conversation and asks for JSON.

The message is the answer's `response`; what the model thought of first is kept with the turn and said to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from upshot.core.conversation import Conversation, Message, Turn, derive_seed
from upshot.rollout.policy import Policy
from upshot.tasks.participants.ask import Flaw, ask, text_schema
from upshot.tasks.participants.templates import as_lines, as_text, render

SCHEMA = text_schema("current_problem", "thought", "response")


class JsonProactive(Policy):
    """A policy that plans in JSON before it speaks."""

    async def reply(self, conversation: Conversation, role: str = "policy") -> Turn | None:
        """Ask for the plan and say its response; `ModelCallError` when the model gives nothing usable."""
        seed = derive_seed(conversation.seed, "turn", len(conversation.turns))
        prompt = render(
            "proactive",
            conversation=as_lines(conversation.messages),
            additional_info=as_text(conversation.row.meta.get("additional_info")),
            max_new_tokens=self.sampling.max_tokens,
        )
        answer = await ask(self.model, prompt, SCHEMA, _flaw, replace(self.sampling, seed=seed), role)
        values = answer.values
        note = {key: as_text(values.get(key)) for key in ("current_problem", "thought")}
        return conversation.say(Message("assistant", values["response"].strip()), note=note)


def _flaw(values: Mapping[str, Any]) -> Flaw | None:
    said = values.get("response")
    if not isinstance(said, str) or not said.strip():
        return Flaw("missing_key", '"response" must be text')
    return None
