"""Scripted models: a function answers. For tests, offline work and timing, with the guards of real calls.

`AbsentPolicy` stands for a policy that may not be called: checks and replays build only the other participants.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Unpack, cast

from upshot.config.model_spec import ModelSpec
from upshot.config.registry import import_thing
from upshot.core.conversation import Message, derive_seed
from upshot.core.errors import UserError, did_you_mean
from upshot.models.base import Abilities, Completion, Model, Request
from upshot.models.client.guarded import GuardedModel, Guards
from upshot.models.openai_format import ApiAnswer
from upshot.models.structured import example_of

Reply = str | Completion
Script = Callable[[Request], Reply | Awaitable[Reply]]

SCRIPTS: dict[str, Script] = {}
"""Scripts by name: `scripted:NAME`."""


def script(name: str) -> Callable[[Script], Script]:
    """Decorator: make a function known as `scripted:NAME`."""

    def add(function: Script) -> Script:
        SCRIPTS[name] = function
        return function

    return add


class ScriptedModel(GuardedModel):
    """A model whose completions are a function of the request; each of n samples gets its own seed."""

    abilities = Abilities(schema=True, tools=True, seed=True)

    def __init__(self, spec: ModelSpec, function: Script | None = None, **guards: Unpack[Guards]) -> None:
        super().__init__(spec, **guards)
        self._function = function or find_script(spec.model.removeprefix("scripted:"))

    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        if self.spec.latency_s:
            await asyncio.sleep(self.spec.latency_s)
        completions = []
        for i in range(n):
            seeded = request if seed is None else request.with_seed(seed if i == 0 else derive_seed(seed, i))
            reply = self._function(seeded)
            if inspect.isawaitable(reply):
                reply = await reply
            if isinstance(reply, str):  # a word counts as a token
                words = sum(len(message.content.split()) for message in cast("Sequence[Message]", request.prompt))
                reply = Completion(reply, "stop", prompt_tokens=words, completion_tokens=len(reply.split()))
            completions.append(reply)
        used = sum(completion.completion_tokens for completion in completions)
        return ApiAnswer(completions, completions[0].prompt_tokens, used, sum(c.cost for c in completions))


class AbsentPolicy(Model):
    """Stands in for a policy that may not be called."""

    name = "policy"

    def copy_at(self, when: str) -> Model:
        """The same stand-in."""
        return self

    async def generate(self, request: Request) -> list[Completion]:
        """Refuse."""
        raise UserError("no policy is available here; name a different model for the role that uses it (models.…=)")


def find_script(name: str) -> Script:
    """The function behind a name or a `package.module:function` path."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        if name not in SCRIPTS:
            raise UserError(
                f"unknown model 'scripted:{name}'; {did_you_mean(name, SCRIPTS)} "
                "(your own: 'scripted:my_package.module:function')"
            )
        return SCRIPTS[name]
    function: Any = import_thing(name, "scripted model")
    if not callable(function):
        raise UserError(f"'scripted:{name}': '{attribute}' of module '{module_name}' is not a function")
    return function  # type: ignore[no-any-return]


def last_text(request: Request) -> str:
    """The last message of the prompt."""
    return request.prompt[-1].content if request.prompt else ""  # type: ignore[union-attr]


@script("echo")
def echo(request: Request) -> str:
    """Repeats the last message; if JSON is requested, fills the schema's text fields with it."""
    return _fill(request, last_text(request))


@script("ok")
def ok(request: Request) -> str:
    """Says OK, or the smallest JSON that the schema allows."""
    return _fill(request, "OK")


@script("rater")
def rate(request: Request) -> str:
    """Says OK; if JSON is requested, its numbers come from a hash of the prompt: a judge whose ratings vary."""
    if request.schema is None:
        return "OK"
    answer = example_of(request.schema, "OK")
    for key, kind in request.schema.get("properties", {}).items():
        drawn = derive_seed(0, key, last_text(request))
        if "enum" in kind:
            answer[key] = kind["enum"][drawn % len(kind["enum"])]
        elif kind.get("type") in ("number", "integer"):
            low, high = kind.get("minimum", 0), kind.get("maximum", 1)
            answer[key] = round(low + (high - low) * (drawn % 101) / 100, 2 if kind["type"] == "number" else None)
    return json.dumps(answer, ensure_ascii=False)


@script("number")
def last_number(request: Request) -> str:
    """Says the last number of the last message after '####', the format of gsm8k."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", last_text(request))
    return _fill(request, f"#### {numbers[-1] if numbers else 0}")


def _fill(request: Request, text: str) -> str:
    return text if request.schema is None else json.dumps(example_of(request.schema, text), ensure_ascii=False)
