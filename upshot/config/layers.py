"""Values laid over each other: a file over those it extends, then the command line or a call over the file.

While layers are merged, every value is a `Sourced`: it carries the name of the layer that gave it, so a value that is
replaced takes its origin with it. What the values mean is checked afterwards. A section may be given in its short form
(`kl: 0.1`), so both sides are brought to their long form before they are merged:
`train.kl=0.1 train.kl.estimator=k2` keeps the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from upshot.config.recipe import Recipe
from upshot.config.short_form import ShortForm
from upshot.config.validation import field_at, model_at
from upshot.core.errors import UserError, did_you_mean

COMMAND_LINE = "command line"
CALL = "call"
DEFAULT = "default"
ADD = "+"
"""As the last part of an override's key: append the value to the list (reward.metrics.+=rm_score)."""


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value and the layer that gave it."""

    value: Any
    origin: str


def tag(value: Any, origin: str) -> Any:
    """A nested value whose leaves know their origin."""
    if isinstance(value, Mapping):
        return {str(key): tag(item, origin) for key, item in value.items()}
    return [tag(item, origin) for item in value] if _is_nested(value) else Sourced(value, origin)


def untag(value: Any) -> Any:
    """The plain value again."""
    if isinstance(value, dict):
        return {key: untag(item) for key, item in value.items()}
    return [untag(item) for item in value] if isinstance(value, list) else bare(value)


def bare(value: Any) -> Any:
    """The value of a leaf."""
    return value.value if isinstance(value, Sourced) else value


def leaves(tree: Any) -> Iterator[tuple[str, Sourced]]:
    """Dotted keys and leaves of a tagged value."""
    return ((key, leaf) for key, leaf in flatten(tree) if isinstance(leaf, Sourced))


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and leaf values of a nested mapping; a list of plain values is a leaf."""
    if not value or not (isinstance(value, Mapping) or _is_nested(value)):
        yield prefix, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))


def differences(one: Recipe, other: Recipe, absent: Any = None) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two recipes differ, with both values; `absent` where one lacks the key."""
    old, new = (dict(flatten(recipe.model_dump(mode="json"))) for recipe in (one, other))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {key: (old.get(key, absent), new.get(key, absent)) for key in changed}


def _is_nested(value: Any) -> bool:
    """Whether a list has more than plain values in it."""
    return isinstance(value, list) and any(isinstance(item, (Mapping, list, Sourced)) for item in value)


def find_origin(key: str, origins: Mapping[str, str]) -> str:
    """The origin of a dotted key: its own, or that of the section it came with."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return DEFAULT


def merge(into: dict[str, Any], data: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
    """Lay a mapping over another one, key by key; `path` is where both stand in the recipe."""
    for key, value in data.items():
        into[key] = lay_over(into.get(key), value, (*path, str(key)))


def lay_over(old: Any, new: Any, path: tuple[str, ...]) -> Any:
    """A value over another one: two mappings of the same thing are merged, everything else is replaced."""
    if not isinstance(old, Mapping) and not isinstance(new, Mapping):
        return new
    section = section_at(path)
    long_old, long_new, key = expand(old, section), expand(new, section), _naming_key(section)
    if not isinstance(long_old, dict) or not isinstance(long_new, Mapping):
        return new
    if key in long_new and bare(long_new[key]) != bare(long_old.get(key)):
        return new  # it names a different thing, to which the options of the old one do not apply
    merge(long_old, long_new, path)
    return long_old


def section_at(path: Sequence[str]) -> type[ShortForm] | None:
    """The section of a recipe at a dotted key; None for options of a named thing and plain values."""
    return model_at(Recipe, path)  # type: ignore[return-value]  # every section has or may have a short form


def expand(value: Any, section: type[ShortForm] | None) -> Any:
    """The long form of a section's value; a plain text among a named thing's options can only be a name."""
    if isinstance(value, Sourced):
        long = expand(value.value, section)
        return value if long is value.value else tag(long, value.origin)
    if section is not None:
        return section.expand(value)
    return {"name": value} if isinstance(value, str) else value


def _naming_key(section: type[ShortForm] | None) -> str:
    """The key that names the thing whose options stand beside it; '' for a section that names nothing."""
    if section is None:
        return "name"
    return section.short_key if section.own_options else ""


def put(tree: dict[str, Any], key: str, value: Any, origin: str) -> None:
    """Set a value by its dotted key; a mapping from a call is laid over what is there, one from a text replaces it."""
    node: Any = tree
    parts = key.split(".")
    for position, part in enumerate(parts[:-1]):
        path = tuple(parts[: position + 1])
        if isinstance(node, list):
            index = _index(node, part, ".".join(path[:-1]), origin)
            parts[position] = str(index)
            node = node[index]
            continue
        inner = expand(node.get(part), section_at(path))
        if bare(inner) is None:
            inner = _default_list(path) if parts[position + 1] == ADD else {}
        elif isinstance(inner, Sourced) and isinstance(inner.value, list):
            inner = [Sourced(item, inner.origin) for item in inner.value]
        elif isinstance(inner, Sourced):
            raise UserError(f"{origin}: '{key}' is inside '{'.'.join(path)}', which is {inner.value!r}, not a section")
        node[part] = node = inner
    last, new = parts[-1], tag(value, origin)
    if isinstance(node, list) and last == ADD:
        node.append(new)
    elif isinstance(node, list):
        node[_index(node, last, ".".join(parts[:-1]), origin)] = new
    else:
        section = section_at(parts[:-1])
        if section is not None and last == _naming_key(section) and bare(node.get(last)) not in (None, value):
            # A different thing is named (futures.user.name=scripted): options that files gave the old one go.
            for option in node.keys() - section.model_fields.keys():
                if not any(leaf.origin in (COMMAND_LINE, CALL) for _, leaf in leaves(node[option])):
                    del node[option]
        whole = origin == COMMAND_LINE and isinstance(value, Mapping)
        node[last] = new if whole else lay_over(node.get(last), new, tuple(parts))


def _default_list(path: Sequence[str]) -> list[Any]:
    """The list that a key has when the recipe does not set it, to be appended to."""
    info = field_at(Recipe, path)
    default = info.get_default(call_default_factory=True) if info is not None else None
    if not isinstance(default, list):
        raise UserError(f"override '{'.'.join(path)}.+=…' appends to a list, but '{'.'.join(path)}' is not a list")
    return [tag(item.model_dump() if isinstance(item, BaseModel) else item, DEFAULT) for item in default]


def _index(items: list[Any], part: str, where: str, origin: str) -> int:
    """A list position: a number, or the name of a named item (reward.metrics.accuracy.weight=2)."""
    known = [str(bare(item.get("name", ""))) if isinstance(item, Mapping) else str(bare(item)) for item in items]
    index = int(part) if part.isdigit() and int(part) < len(items) else known.index(part) if part in known else None
    if index is None:
        raise UserError(f"{origin}: '{where}' has no item '{part}'; {did_you_mean(part, known)}")
    if isinstance(bare(items[index]), str):
        items[index] = {"name": items[index]}
    return index
