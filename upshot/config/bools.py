"""True and false are not numbers: pydantic reads them as 1 and 0, so a learning rate of `true` would train as 1."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from types import UnionType
from typing import Any

from pydantic import BaseModel, ValidationInfo, field_validator

NO_BOOL = "give a number, not true or false"


class PlainNumbers(BaseModel):
    """A model whose numbers are given as numbers."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool(cls, value: Any, info: ValidationInfo) -> Any:
        if is_misplaced_bool(value, cls.model_fields[str(info.field_name)].annotation):
            raise ValueError(NO_BOOL)
        return value


def is_misplaced_bool(value: Any, *kinds: Any) -> bool:
    """Whether a bool stands where one of these kinds wants a number, in the value or in its lists and mappings."""
    allowed = [option for kind in kinds for option in _options(kind)]
    if isinstance(value, bool):
        is_wanted = any(option in (bool, object, Any) for option in allowed)
        return not is_wanted and any(option in (int, float) for option in allowed)
    if isinstance(value, Mapping):
        return any(is_misplaced_bool(item, *_kinds_at(allowed, key)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return any(is_misplaced_bool(item, *_kinds_at(allowed, place)) for place, item in enumerate(value))
    return False


def _options(kind: Any) -> Iterator[Any]:
    """The types that an annotation allows, without their bounds."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        yield from _options(typing.get_args(kind)[0])
    elif origin in (typing.Union, UnionType):
        for part in typing.get_args(kind):
            yield from _options(part)
    else:
        yield kind


def _kinds_at(allowed: Sequence[Any], key: Any) -> Iterator[Any]:
    """What may stand at a key or place of a value of one of these types."""
    for option in allowed:
        inside = typing.get_args(option)
        if isinstance(option, type) and is_dataclass(option):
            yield typing.get_type_hints(option, include_extras=True).get(str(key), Any)
        elif typing.get_origin(option) is tuple and Ellipsis not in inside:
            yield from inside[key : key + 1] if isinstance(key, int) else ()
        elif inside and typing.get_origin(option) is not typing.Literal:
            yield inside[0] if Ellipsis in inside else inside[-1]
