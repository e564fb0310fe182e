"""Asks a model for a JSON object, checks the answer, and asks again if it cannot be used.

A fatal flaw that remains (no JSON, a rating out of range) raises `ModelCallError` with the flaw as its reason. An
answer with a tolerable one (a user that talks like an assistant) is accepted after the last attempt, and the flaw is
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.conversation import Message, derive_seed
from upshot.models.base import Model, ModelCallError, Request
from upshot.models.structured import RATERS, SEVERAL, explain_missing_schema, fit_texts, json_objects
from upshot.tasks.participants.templates import render


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why an answer cannot be used as it is."""

    code: str
    """Short, countable and stable."""
    hint: str
    """The correction that the model gets with the next attempt."""
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The values of a model's answer, and the flaws of the attempts before it."""

    values: Mapping[str, Any]
    flaws: tuple[str, ...] = field(default=())


Check = Callable[[Mapping[str, Any]], Flaw | None]


async def ask(
    model: Model,
    prompt: str,
    schema: Mapping[str, Any],
    check: Check,
    sampling: Sampling,
    role: str,
    repairs: int = 2,
    flaws: list[str] | None = None,
) -> ModelAnswer:
    """The model's answer as an object; the model is asked again, with the flaw, up to `repairs` times.

    The list `flaws`, if given, is filled as flaws occur, so that they are known even if the call fails.
    """
    seen: list[str] = flaws if flaws is not None else []
    messages = [Message("user", prompt)]
    bearable: Mapping[str, Any] | None = None
    for attempt in range(repairs + 1):
        seed = sampling.seed if not attempt or sampling.seed is None else derive_seed(sampling.seed, attempt)
        enforced = schema if model.abilities.schema else None
        request = Request(messages, replace(sampling, seed=seed), schema=enforced, role=role)
        (completion,) = await model.generate(request)
        values, flaw = read_answer(completion.text, completion.finish, check, alone=role in RATERS)
        if flaw is None:
            return ModelAnswer(values, tuple(seen))
        seen.append(flaw.code)
        if flaw.code == "truncated" and model.abilities.lengths:
            schema = fit_texts(schema, sampling.max_tokens // (attempt + 1))
        bearable = bearable if flaw.fatal else values
        again = render("again", problem=flaw.hint, keys=", ".join(f'"{key}"' for key in schema["properties"]))
        messages = [Message("user", prompt), Message("assistant", completion.text), Message("user", again)]
    if bearable is not None:
        return ModelAnswer(bearable, tuple(seen))
    raise ModelCallError(seen[-1], f"after {repairs + 1} attempts{explain_missing_schema(model)}")


def read_answer(text: str, finish: str, check: Check, alone: bool) -> tuple[Mapping[str, Any], Flaw | None]:
    """The object in a completion, and its flaw, if it has one; `alone`: several possible answers are a flaw."""
    try:
        objects = json_objects(text)
    except ValueError as error:
        if finish == "length":
            return {}, Flaw("truncated", "it was cut off before the JSON object ended; be much shorter")
        return {}, Flaw("bad_json", f"it is not one JSON object ({error})")
    fitting = [values for values in objects if check(values) is None]
    if alone and any(values != fitting[0] for values in fitting):
        return {}, Flaw("bad_json", SEVERAL)
    values = (fitting or objects)[0]
    return values, check(values)


def text_schema(*keys: str) -> dict[str, Any]:
    """The schema of an object whose keys are all text."""
    return object_schema({key: {"type": "string"} for key in keys})


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object with just these properties, all required."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
