"""Gets JSON from a model: parses it strictly, checks it against the schema, and asks again if it does not fit.

Text stays as it was meant: `"42"` is text, unicode is untouched, and LaTeX survives. A model that writes `\\frac` with
one backslash has written valid JSON for a form feed and "rac"; since no reply means a form feed, it is read as LaTeX.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.conversation import Message, derive_seed
from upshot.core.thought import MARKERS, split_thought
from upshot.models.base import Model, ModelCallError, Request
from upshot.models.tool_calls.base import Extent, refuse_constant

SEVERAL = "it has several JSON objects that differ"
RATERS = ("judge", "monitor")
"""Roles whose prompt holds the policy's words, and whose answer is a score: one that they quote must not count."""
_FENCE = re.compile(r"```[a-zA-Z]*\s*\n(.*?)```", re.DOTALL)
_WRONG_ESCAPE = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)', re.DOTALL)
_LATEX = re.compile(
    r"[\b\f\r](?=[A-Za-z])"
    r"|\t(?=(?:ext(?:bf|it|rm|tt)?|frac|ilde)\{|(?:imes|heta|au|anh?|o|op|riangle(?:left|right)?)(?![A-Za-z0-9_]| ?=))"
    r"|\n(?=(?:eq|abla|otin|eg|mid|exists|leq|geq|parallel|subseteq|ewline)(?![A-Za-z0-9_]| ?=))"
)
_LETTER = {"\b": "\\b", "\f": "\\f", "\r": "\\r", "\t": "\\t", "\n": "\\n"}


def parse_json_object(text: str, schema: Mapping[str, Any] | None = None, alone: bool = False) -> dict[str, Any]:
    """The first JSON object of a reply that fits the schema; `ValueError` with the reason where none does.

    alone: refuse a reply with several that differ. A judge may quote what it rates before it says its own.
    """
    objects = json_objects(text)
    flaws = [schema_flaw(value, schema) if schema else None for value in objects]
    fitting = [value for value, flaw in zip(objects, flaws, strict=True) if flaw is None]
    if not fitting:
        raise ValueError(flaws[-1])
    if alone and any(value != fitting[0] for value in fitting):
        raise ValueError(SEVERAL)
    return fitting[0]


def json_objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a reply: the whole of it, else fenced blocks and then all balanced objects that parse.

    A draft inside `<think>` does not count. Raises `ValueError` with the reason if there are none.
    """
    problem, found = "no JSON object in the reply", []
    for place, candidate in enumerate(_candidates(text)):
        try:
            value = _loads(candidate)
        except ValueError as error:
            problem = f"not valid JSON: {error}"
            continue
        if not isinstance(value, dict):
            problem = f"a JSON object is needed, not {type(value).__name__}"
            continue
        found.append(_latex(value))
        if place < 2:  # it is the whole text, or the whole answer
            break
    if not found:
        raise ValueError(problem)
    return found


def _candidates(text: str) -> Iterator[str]:
    yield text.strip()
    answer = split_thought(text)[1]
    yield answer.strip()
    for fenced in _FENCE.finditer(answer):
        yield fenced[1].strip()
    yield from _objects(answer)
    # A marker inside an object is part of its text, and does not mark a thought.
    yield from (candidate for candidate in _objects(text) if any(marker in candidate for marker in MARKERS))


def _objects(text: str) -> Iterator[str]:
    """The balanced objects of a text, outermost first; braces inside strings do not count."""
    start = text.find("{")
    while start >= 0:
        end, whole = Extent(start).end(text) or (start + 1, False)
        if whole:
            yield text[start:end]
        start = text.find("{", end if whole else start + 1)


def _loads(text: str) -> Any:
    """Strict JSON or, if that fails, JSON with raw line breaks and meaningless backslashes in strings."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except ValueError as error:
        repaired = _WRONG_ESCAPE.sub(lambda match: match[0] if match[1] else "\\\\", text)
        try:
            return json.loads(repaired, strict=False, parse_constant=refuse_constant)
        except ValueError:
            raise error from None


def _latex(value: Any) -> Any:
    if isinstance(value, str):
        return _LATEX.sub(lambda match: _LETTER[match[0]], value)
    if isinstance(value, list):
        return [_latex(item) for item in value]
    if isinstance(value, dict):
        return {key: _latex(item) for key, item in value.items()}
    return value


def schema_flaw(value: Any, schema: Mapping[str, Any]) -> str | None:
    """What is wrong with a value by the schema's terms: where it is, and what jsonschema says; None when it fits."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from jsonschema_specifications import REGISTRY  # its own pages only: a $ref to the web is not fetched

    error = best_match(Draft202012Validator(schema, registry=REGISTRY).iter_errors(value))
    if error is None:
        return None
    path = error.json_path.removeprefix("$").removeprefix(".")
    return f"'{path}': {error.message}" if path else error.message


def example_of(schema: Any, text: str) -> Any:
    """A small value that fits a schema, with `text` where text is wanted."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        return example_of(choice, text)
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {key: example_of(value, text) for key, value in schema.get("properties", {}).items()}
    if kind == "array":
        return [example_of(schema.get("items", {"type": "string"}), text)] * schema.get("minItems", 0)
    if kind in ("integer", "number"):
        return schema.get("minimum", schema.get("maximum", 0))
    return {"string": text, "boolean": True, "null": None}[kind]


def json_request(schema: Mapping[str, Any]) -> str:
    """The words that ask a model without structured output for JSON; a weak model would copy a raw schema."""
    return f"Answer with one JSON object and nothing else. Its form: {shape_of(schema)}"


def shape_of(schema: Mapping[str, Any]) -> str:
    """A schema as a person would write it: {"city": "text", "score": number from 0 to 1}."""
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    if "enum" in schema:
        return " or ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(shape_of(option) for option in schema["anyOf"])
    kind = schema.get("type", "object")
    if not isinstance(kind, str):
        return " or ".join(shape_of({**schema, "type": one}) for one in kind)
    if kind == "object":
        parts = [f"{json.dumps(key)}: {shape_of(value)}" for key, value in schema.get("properties", {}).items()]
        return "{" + ", ".join(parts) + "}"
    if kind == "array":
        return f"[{shape_of(schema.get('items', {'type': 'string'}))}, ...]"
    if kind == "string":
        return json.dumps(schema.get("description") or "text", ensure_ascii=False)
    least, most = schema.get("minimum"), schema.get("maximum")
    word = {"integer": "whole number", "boolean": "true or false"}.get(kind, kind)
    bounds = [f"from {least:g}" if least is not None else "", f"to {most:g}" if most is not None else ""]
    return " ".join([word, *filter(None, bounds)])


def fit_texts(schema: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """The schema of an object with limits for its texts, so that the whole of it fits into `max_tokens`.

    Texts share the tokens evenly, and a character counts as a token, so the object is short, but complete.
    """
    texts = {key: value for key, value in schema["properties"].items() if value.get("type") == "string"}
    most = max(1, max_tokens // (len(texts) + 1))
    limited = {key: {**value, "maxLength": min(most, value.get("maxLength", most))} for key, value in texts.items()}
    return {**schema, "properties": {**schema["properties"], **limited}}


def explain_missing_schema(model: Model) -> str:
    """An addition to the error about an unusable answer, if a schema could have been enforced."""
    return f"; {model.no_schema}" if model.no_schema else ""


async def ask_json(
    model: Model,
    messages: Sequence[Message],
    schema: Mapping[str, Any],
    sampling: Sampling | None = None,
    role: str = "",
    repairs: int = 2,
) -> dict[str, Any]:
    """The model's answer as an object that fits the schema.

    The backend enforces the schema if it can; otherwise the prompt describes it. An answer that does not fit is shown
    to the model with the error, up to `repairs` times; then `ModelCallError` with the reason 'bad_json'.
    """
    sampling = sampling or Sampling()
    history = list(messages)
    if not model.abilities.schema:
        history.append(Message("user", json_request(schema)))
    for attempt in range(repairs + 1):
        seed = sampling.seed if not attempt or sampling.seed is None else derive_seed(sampling.seed, attempt)
        request = Request(history, replace(sampling, seed=seed), schema=schema, role=role)
        (completion,) = await model.generate(request)
        try:
            return parse_json_object(completion.text, schema, alone=role in RATERS)
        except ValueError as error:
            flaw = f"{error} (cut at {sampling.max_tokens} tokens)" if completion.finish == "length" else str(error)
        if completion.finish == "length" and model.abilities.lengths:
            schema = fit_texts(schema, sampling.max_tokens // (attempt + 1))
        objection = f"That cannot be used: {flaw}. {json_request(schema)}"
        history += [Message("assistant", completion.text), Message("user", objection)]
    problem = f"'{model.name}' after {repairs + 1} answers: {flaw}{explain_missing_schema(model)}"
    raise ModelCallError("bad_json", problem)
