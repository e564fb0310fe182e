"""Scripted models for the tests of this folder and its neighbours."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.core.conversation import Conversation, Message, Row
from upshot.models.base import Completion, Request
from upshot.models.scripted import ScriptedModel


def speaker(function: Callable[[Request], str | Completion]) -> ScriptedModel:
    """A model that is played by a function."""
    return ScriptedModel(ModelSpec(model="scripted:ok"), function)


def in_turn(*texts: str | Completion) -> ScriptedModel:
    """A model that returns these texts in order and then repeats the last; `.requests` are its requests."""
    requests: list[Request] = []

    def answer(request: Request) -> str | Completion:
        requests.append(request)
        return texts[min(len(requests), len(texts)) - 1]

    model = speaker(answer)
    model.requests = requests  # type: ignore[attr-defined]
    return model


def says(response: str, current_answer: str = "", thought: str = "") -> str:
    """A user's answer as JSON."""
    return json.dumps({"current_answer": current_answer, "thought": thought, "response": response}, ensure_ascii=False)


def chat(*lines: str, goal: Any = None, reference: Any = None, **meta: Any) -> Conversation:
    """A conversation that the user opens and in which the speakers alternate; the first line is the row's opening."""
    row = Row("row", (Message("user", lines[0]),) if lines else (), goal, reference, "test", meta)
    conversation = Conversation(row)
    for index, line in enumerate(lines[1:]):
        conversation.say(Message("user" if index % 2 else "assistant", line))
    return conversation
