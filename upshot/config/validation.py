"""Values from outside → checked ones, by pydantic; what is wrong becomes one line that names key, value and way out.

One system for everything a recipe can say: its sections are models (`recipe/`), the options of a named thing are the
annotated parameters of its constructor (`registry.py`), and `explain_error` reports the errors of both.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from upshot.config import bounds
from upshot.config.bools import NO_BOOL, is_misplaced_bool
from upshot.config.other_names import translate_key, translate_value
from upshot.core.errors import UserError, did_you_mean, near

SHOWN = 80
"""At most this many characters of a wrong value are repeated."""


def check_value(name: str, value: Any, kind: Any) -> Any:
    """A value of the kind that an argument wants; `UserError` for any other."""
    if is_misplaced_bool(value, kind):
        raise UserError(f"{name} = {_shown(value)}: {NO_BOOL}")
    try:
        # What checks a kind of value; NaN is refused except where the type itself accepts it.
        config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
        own_config = isinstance(kind, type) and (issubclass(kind, BaseModel) or hasattr(kind, "__dataclass_fields__"))
        return (TypeAdapter(kind) if own_config else TypeAdapter(kind, config=config)).validate_python(value)
    except PydanticSchemaGenerationError:  # a user's own type that pydantic does not know
        return value
    except ValidationError as error:
        raise UserError(explain_error(error, place=name)) from None


def explain_error(error: ValidationError, root: type[BaseModel] | None = None, place: str = "") -> str:
    """The first thing that is wrong, as one line; `root`: whose keys are known, `place`: the key before its own."""
    first = first_error(error)
    inner = [str(part) for part in first["loc"]]
    path = [*([place] if place else []), *inner]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        section = model_at(root, inner[:-1]) if root is not None else None
        there = translate_key(path[-1], first["input"], keys_of(root)) if root is not None else ""
        known: Iterable[str] = section.model_fields if section is not None else ()
        if there and not near(path[-1], known):
            return f"unknown key '{key}'; {there}"
        where = f" in {'.'.join(path[:-1])}" if path[:-1] else ""
        return f"unknown key '{path[-1]}'{where}; {did_you_mean(path[-1], known)}"
    if first["type"] == "missing":
        return f"'{key}' is required but not set"
    message = _message(first)
    if first["type"] in ("model_type", "dict_type") and not isinstance(first["input"], Mapping):
        section = model_at(root, inner) if root is not None else None
        keys = f" with the keys {', '.join(section.model_fields)}" if section is not None else ""
        return f"{key} = {_shown(first['input'])}: '{key}' is a section{keys}; leave it out for its defaults"
    if isinstance(first["input"], Mapping) and first["type"] == "value_error":  # what two keys together mean
        return message if key in message else f"{key}: {message}"
    translated = translate_value(key, first["input"])
    reason = f"here it is {translated}" if translated else message[0].lower() + message[1:]
    return f"{key} = {_shown(first['input'])}: {reason}"


def _message(error: ErrorDetails) -> str:
    """What pydantic says of an error; of a predicate of ours, what its docstring says."""
    text = error["msg"].removeprefix("Value error, ")
    if error["type"] == "predicate_failed":
        predicate = getattr(bounds, text.split()[1].strip("'").rpartition(".")[2], None)
        text = (predicate.__doc__ or text).rstrip(".") if predicate is not None else text
    return text


def first_error(error: ValidationError) -> ErrorDetails:
    """The error to report of several. Missing keys come last: a mistyped key is both an unknown and a missing one."""
    errors = error.errors()
    return next((one for one in errors if one["type"] != "missing"), errors[0])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models that an annotation speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_in(part)]


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a model and of the sections in it."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}"
        if getattr(info.annotation, "__origin__", None) not in (dict, list):
            for inner in models_in(info.annotation):
                yield from keys_of(inner, f"{prefix}{name}.")


def field_at(model: type[BaseModel], path: Sequence[str]) -> FieldInfo | None:
    """The field behind a dotted key; None for options of a named thing."""
    section = model_at(model, path[:-1])
    return section.model_fields.get(path[-1]) if section is not None else None


def model_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The model behind a dotted key, None for options of a named thing and plain values."""
    parts = iter(path)
    for part in parts:
        if part.isdigit():
            continue
        info = model.model_fields.get(part)
        if info is None or not (models := models_in(info.annotation)):
            return None
        model = models[0]
        if getattr(info.annotation, "__origin__", None) is dict:
            next(parts, None)  # the name of one of them
    return model
