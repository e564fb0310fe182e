"""Values laid over each other: a file over those it extends, then the command line or a call over the file.

Everything here is plain data, as YAML gives it; what it means is checked afterwards. A section may be given in its
short form (`kl: 0.1`), so both sides are brought to their long form before they are merged:
`train.kl=0.1 train.kl.estimator=k2` keeps the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from upshot.config.recipe import Recipe
from upshot.config.short_form import ShortForm
from upshot.config.validation import model_at
from upshot.core.errors import UserError, did_you_mean

COMMAND_LINE = "command line"
CALL = "call"
DEFAULT = "default"
ADD = "+"
"""As the last part of an override's key: put the value behind those that the list has (reward.metrics.+=rm_score)."""


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and leaf values of a nested mapping."""
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in value):
        items = list(enumerate(value))
    if not items:
        yield prefix, value
    for key, item in items:
        yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))


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
    section = model_at(Recipe, path)
    long_old, long_new = expand(old, section), expand(new, section)
    if not isinstance(long_old, dict) or not isinstance(long_new, Mapping) or _another(long_old, long_new, section):
        return new
    merge(long_old, long_new, path)
    return long_old


def expand(value: Any, section: type[BaseModel] | None) -> Any:
    """The long form of a section's value; a text among a named thing's own options can only be a name."""
    if section is not None and issubclass(section, ShortForm):
        return section.expand(value)
    return {"name": value} if section is None and isinstance(value, str) else value


def _another(old: Mapping[str, Any], new: Mapping[str, Any], section: type[BaseModel] | None) -> bool:
    """Whether the new one names another thing, so that options of the old one mean nothing to it."""
    key = "name"
    if section is not None and issubclass(section, ShortForm):
        key = section.short_key if section.own_options else ""
    return key in new and new[key] != old.get(key)


def put(data: dict[str, Any], origins: dict[str, str], key: str, value: Any, origin: str) -> None:
    """Set a value by its dotted key; a mapping from a call is laid over what is there, one from a text replaces it."""
    node: Any = data
    parts = key.split(".")
    for position, part in enumerate(parts[:-1]):
        path = tuple(parts[: position + 1])
        if isinstance(node, list):
            index = _index(node, part, ".".join(path[:-1]), origin)
            parts[position] = str(index)
            node = node[index]
            continue
        node[part] = expand(node.get(part), model_at(Recipe, path))
        if not isinstance(node[part], (dict, list)):
            if node[part] is not None:
                raise UserError(
                    f"{origin}: '{key}' is inside '{'.'.join(path)}', which is {node[part]!r} and no section"
                )
            node[part] = _default_list(path) if parts[position + 1] == ADD else {}
        node = node[part]
    if isinstance(node, dict):
        _drop_foreign_options(node, parts, value, origins)
    merged = _put_last(node, parts, value, origin)
    key = ".".join(parts)
    keys = [f"{key}.{inner}" if inner else key for inner, _ in flatten(value)] if origin == CALL else [key]
    forget(origins, keys, value if merged else None)
    origins.update(dict.fromkeys(keys, origin))


def _drop_foreign_options(node: dict[str, Any], parts: Sequence[str], value: Any, origins: dict[str, str]) -> None:
    """Where a key names another thing (futures.user.name=scripted), options that files gave the old one go."""
    section = model_at(Recipe, parts[:-1])
    if section is None or not issubclass(section, ShortForm) or not section.own_options:
        return
    if section.short_key != parts[-1] or node.get(parts[-1]) in (None, value):
        return
    above = ".".join(parts[:-1])
    for option in [name for name in node if name not in section.model_fields]:
        key = f"{above}.{option}"
        if find_origin(key, origins) not in (COMMAND_LINE, CALL):
            del node[option]
            for old in [k for k in origins if k == key or k.startswith(f"{key}.")]:
                del origins[old]


def _put_last(node: Any, parts: list[str], value: Any, origin: str) -> bool:
    """Set the value in its mapping or list, and its position among the parts; whether it was laid over another."""
    where, last = ".".join(parts[:-1]), parts[-1]
    if isinstance(node, list) and last == ADD:
        parts[-1] = str(len(node))
        node.append(value)
    elif isinstance(node, list):
        index = _index(node, last, where, origin)
        parts[-1] = str(index)
        node[index] = value
    elif origin == COMMAND_LINE and isinstance(value, Mapping):
        node[last] = value
    else:
        node[last] = lay_over(node.get(last), value, tuple(parts))
        return node[last] is not value
    return False


def forget(origins: dict[str, str], said: Sequence[str], merged: Any = None) -> None:
    """Take away the origins of what is said anew; of a section's short form that is merged, only those of its keys."""
    for key in said:
        section = model_at(Recipe, key.split("."))
        long = expand(merged, section)
        inner = {f"{key}.{name}" for name in long} if isinstance(long, Mapping) else None
        for old in [k for k in origins if k.startswith(f"{key}.")]:
            if inner is None or old in inner:
                del origins[old]


def _default_list(path: Sequence[str]) -> list[Any]:
    """The list that a key has when the recipe does not set it, to be added to."""
    section = model_at(Recipe, path[:-1])
    info = section.model_fields.get(path[-1]) if section is not None else None
    default = info.get_default(call_default_factory=True) if info is not None else None
    if not isinstance(default, list):
        raise UserError(f"override '{'.'.join(path)}.+=…' adds to a list, and '{'.'.join(path)}' is none")
    return [item.model_dump() if isinstance(item, BaseModel) else item for item in default]


def _index(items: list[Any], part: str, where: str, origin: str) -> int:
    """A list position: a number, or the name of a named item (reward.metrics.accuracy.weight=2)."""
    known = [str(item.get("name", "")) if isinstance(item, Mapping) else str(item) for item in items]
    index = int(part) if part.isdigit() and int(part) < len(items) else known.index(part) if part in known else None
    if index is not None:
        if isinstance(items[index], str):
            items[index] = {"name": items[index]}
        return index
    raise UserError(f"{origin}: '{where}' has no item '{part}'; {did_you_mean(part, known)}")
