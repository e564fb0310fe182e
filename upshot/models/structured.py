"""JSON out of a model: parse strictly, check against the schema, and ask again with the error where it does not fit.

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
from upshot.core.thought import after_thought
from upshot.models.base import Model, ModelCallError, Request

_FENCE = re.compile(r"```[a-zA-Z]*\s*\n(.*?)```", re.DOTALL)
_WRONG_ESCAPE = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)', re.DOTALL)
_LATEX = re.compile(
    r"[\b\f\r](?=[A-Za-z])"
    r"|\t(?=(?:ext(?:bf|it|rm|tt)?|frac|ilde)\{|(?:imes|heta|au|anh?|o|op|riangle(?:left|right)?)(?![A-Za-z0-9_]| ?=))"
    r"|\n(?=(?:eq|abla|otin|eg|mid|exists|leq|geq|parallel|subseteq|ewline)(?![A-Za-z0-9_]| ?=))"
)
_LETTER = {"\b": "\\b", "\f": "\\f", "\r": "\\r", "\t": "\\t", "\n": "\\n"}
_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def parse_json_object(text: str, schema: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in a reply: the whole of it, else a fenced block, else the first balanced object that parses.

    A draft inside `<think>` is none. Raises `ValueError` with the reason when there is none or it breaks the schema.
    """
    problem = "no JSON object in the reply"
    for candidate in _candidates(text):
        try:
            value = _loads(candidate)
        except ValueError as error:
            problem = f"not valid JSON: {error}"
            continue
        if not isinstance(value, dict):
            problem = f"a JSON object is needed, not {type(value).__name__}"
            continue
        value = _latex(value)
        flaw = schema_flaw(value, schema) if schema else None
        if flaw is None:
            return value
        problem = flaw
    raise ValueError(problem)


def _candidates(text: str) -> Iterator[str]:
    yield text.strip()
    text = after_thought(text)
    yield text.strip()
    for fenced in _FENCE.finditer(text):
        yield fenced[1].strip()
    start = text.find("{")
    while start >= 0:
        end = _object_end(text, start)
        if end is None:
            start = text.find("{", start + 1)
            continue
        yield text[start:end]
        start = text.find("{", end)


def _object_end(text: str, start: int) -> int | None:
    """Where the object that opens at `start` is closed; braces inside strings do not count."""
    depth, in_string, i = 0, False, start
    while i < len(text):
        char = text[i]
        if in_string:
            if char == "\\":
                i += 1
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return i + 1
        i += 1
    return None


def _loads(text: str) -> Any:
    """Strict JSON; failing that, with backslashes that escape nothing and raw line breaks in strings let through."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        mended = _WRONG_ESCAPE.sub(lambda match: match[0] if match[1] else "\\\\", text)
        try:
            return json.loads(mended, strict=False, parse_constant=_no_constant)
        except ValueError:
            raise error from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _latex(value: Any) -> Any:
    if isinstance(value, str):
        return _LATEX.sub(lambda match: _LETTER[match[0]], value)
    if isinstance(value, list):
        return [_latex(item) for item in value]
    if isinstance(value, dict):
        return {key: _latex(item) for key, item in value.items()}
    return value


def schema_flaw(value: Any, schema: Mapping[str, Any], path: str = "") -> str | None:
    """What is wrong with a value by the schema's terms (types, ranges, lengths, required, enum …), or None."""
    at = f"'{path}'" if path else "the answer"
    if "anyOf" in schema:
        flaws = [schema_flaw(value, option, path) for option in schema["anyOf"]]
        return None if None in flaws else flaws[0]
    if "enum" in schema and value not in schema["enum"]:
        return f"{at} is {value!r}; allowed: {', '.join(map(repr, schema['enum']))}"
    if "const" in schema and value != schema["const"]:
        return f"{at} is {value!r}; it must be {schema['const']!r}"
    kinds = schema.get("type")
    if kinds is not None and not _is_kind(value, [kinds] if isinstance(kinds, str) else kinds):
        return f"{at} is {_name(value)}; it must be {kinds if isinstance(kinds, str) else ' or '.join(kinds)}"
    if isinstance(value, dict):
        return _object_flaw(value, schema, path)
    if isinstance(value, list):
        items = schema.get("items")
        flaws = [schema_flaw(v, items, f"{path}[{i}]") for i, v in enumerate(value)] if items else []
        return next((flaw for flaw in flaws if flaw), None) or _size_flaw(len(value), schema, "Items", at)
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            return f"{at} does not match {schema['pattern']}"
        return _size_flaw(len(value), schema, "Length", at)
    return _range_flaw(value, schema, at) if isinstance(value, (int, float)) else None


def _is_kind(value: Any, kinds: Sequence[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        return True
    return any(isinstance(value, _KINDS[kind]) for kind in kinds)


def _name(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return f"{kinds.get(type(value), 'a number')} ({json.dumps(value, ensure_ascii=False)[:60]})"


def _object_flaw(value: dict[str, Any], schema: Mapping[str, Any], path: str) -> str | None:
    properties = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value:
            return f"'{f'{path}.{key}' if path else key}' is missing"
    for key, item in value.items():
        if key in properties:
            flaw = schema_flaw(item, properties[key], f"{path}.{key}" if path else key)
            if flaw:
                return flaw
        elif schema.get("additionalProperties") is False:
            return f"'{key}' is not asked for; only {', '.join(properties)}"
    return None


def _size_flaw(size: int, schema: Mapping[str, Any], what: str, at: str) -> str | None:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if size < least or (most is not None and size > most):
        return f"{at} has {size} {what.lower().replace('length', 'characters')}; allowed: {least} to {most or 'any'}"
    return None


def _range_flaw(value: float, schema: Mapping[str, Any], at: str) -> str | None:
    for key, wrong, word in (
        ("minimum", lambda limit: value < limit, "at least"),
        ("maximum", lambda limit: value > limit, "at most"),
        ("exclusiveMinimum", lambda limit: value <= limit, "more than"),
        ("exclusiveMaximum", lambda limit: value >= limit, "less than"),
    ):
        if key in schema and wrong(schema[key]):
            return f"{at} is {value}; it must be {word} {schema[key]}"
    return None


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
    """How a model without structured output is asked for JSON; a weak one would copy a raw schema into its answer."""
    return f"Answer with one JSON object and nothing else. Its form: {shape_of(schema)}"


def shape_of(schema: Mapping[str, Any]) -> str:
    """A schema as a reader would write it down: {"city": "text", "score": number from 0 to 1}."""
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


async def ask_json(
    model: Model,
    messages: Sequence[Message],
    schema: Mapping[str, Any],
    sampling: Sampling | None = None,
    role: str = "",
    repairs: int = 2,
) -> dict[str, Any]:
    """The model's answer as an object that fits the schema.

    Enforced by the backend where it can; else asked for in words. An answer that does not fit is shown to the model
    with the error, up to `repairs` times; then `ModelCallError` with the reason 'bad_json'.
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
            return parse_json_object(completion.text, schema)
        except ValueError as error:
            flaw = f"{error} (cut at {sampling.max_tokens} tokens)" if completion.finish == "length" else str(error)
        history += [
            Message("assistant", completion.text),
            Message("user", f"That cannot be used: {flaw}. {json_request(schema)}"),
        ]
    raise ModelCallError("bad_json", f"'{model.name}' after {repairs + 1} answers: {flaw}")
