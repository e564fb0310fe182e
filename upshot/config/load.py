"""YAML + dotted overrides → a checked recipe that knows where each value came from."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from upshot.config.recipe import Recipe
from upshot.config.reference import models_in
from upshot.config.registry import look_in, path_of
from upshot.core.errors import UserError, did_you_mean
from upshot.core.files import read_text

_CHECKOUT = Path(__file__).parents[2] / "recipes"
RECIPES = _CHECKOUT if _CHECKOUT.is_dir() else Path(sys.prefix) / "share" / "upshot" / "recipes"
"""The recipes of the checkout, or those an installed wheel brought along."""
COMMAND_LINE = "command line"
ADD = "+"
"""As the last part of an override's key: put the value behind those that the list has (reward.metrics.+=rm_score)."""
CALL = "call"
DEFAULT = "default"
OWN_CODE = re.compile(r"(scripted:)?[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""What names a thing of the user's own."""


@dataclass
class ResolvedRecipe:
    """A resolved recipe and the origin of each value, by dotted key."""

    recipe: Recipe
    origins: dict[str, str] = field(default_factory=dict)

    def origin(self, key: str) -> str:
        """Where a value came from: the command line, a call's arguments, a file, or the default.

        Of something given in its short form (`models.judge: URL#name`), what the form does not say is the default.
        """
        if key not in self.origins and _is_default(self.recipe, key):
            return DEFAULT
        return origins_of(key, self.origins)


def origins_of(key: str, origins: Mapping[str, str]) -> str:
    """The origin of a dotted key: its own, or that of the section it came with."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return DEFAULT


class _Loader(yaml.SafeLoader):
    """YAML whose numbers include 1e-5, which YAML 1.1 takes for a text, and whose keys stand once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; a key that is there twice would silently lose its first value."""
        seen: set[Any] = set()
        for key, _ in node.value:
            name = key.value
            if key.tag != "tag:yaml.org,2002:merge" and name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{name}' is there twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)$"),
    list("-+.0123456789"),
)


def load(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()) -> ResolvedRecipe:
    """A recipe by name, by path or as a mapping, with overrides: `key=value` texts, or values by (dotted) key."""
    origins: dict[str, str] = {}
    if isinstance(recipe, Mapping):
        source, data = "recipe", _plain(recipe)
    else:
        path = find(str(recipe))
        source, (data, origins) = str(path), _read(path, ())
        _find_files(data, origins, path)
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            _put(data, origins, key, _plain(value), CALL)
    else:
        for override in overrides:
            _override(data, origins, override)
    loaded = ResolvedRecipe(validate(data, source, origins), origins)
    for folder in loaded.recipe.code:
        look_in(Path(folder))
    return loaded


def _find_files(data: dict[str, Any], origins: dict[str, str], path: Path) -> None:
    """What the recipe names beside itself (its serve file, code of the user's own) is found by a resumed run too."""
    folder = path.resolve().parent
    if isinstance(data.get("serve"), str):
        data["serve"] = str(folder / Path(data["serve"]).expanduser())
    if "code" in data:
        data["code"] = (
            [str(folder / place) for place in data["code"]] if isinstance(data["code"], list) else data["code"]
        )
    elif folder != RECIPES and any(OWN_CODE.fullmatch(str(value)) for _, value in flatten(data)):
        data["code"], origins["code"] = [str(folder)], path.name


def _plain(value: Any) -> Any:
    """A value as YAML would have given it: classes and functions become the names by which they are found."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return path_of(value) if callable(value) else value


def find(name_or_path: str) -> Path:
    """The file of a recipe: a path, or the name of one that ships with the project."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        for candidate in (path, RECIPES / path.name if path.parent.name in ("", "recipes") else path):
            if candidate.is_file():
                return candidate
        raise UserError(f"recipe '{name_or_path}': no such file; {did_you_mean(path.stem, names())}")
    shipped = RECIPES / f"{name_or_path}.yaml"
    if shipped.is_file():
        return shipped
    raise UserError(f"unknown recipe '{name_or_path}'; {did_you_mean(name_or_path, names())} (or a path to a .yaml)")


def names() -> list[str]:
    """The recipes that ship with the project."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def describe(path: Path) -> str:
    """A recipe's own first comment line."""
    for line in path.read_text("utf-8").splitlines():
        text = line.lstrip("# ").strip()
        if line.startswith("#") and text and not text.startswith("yaml-language-server"):
            return text
    return ""


def validate(data: Mapping[str, Any], source: str = "recipe", origins: Mapping[str, str] | None = None) -> Recipe:
    """Check types and keys; what is wrong becomes one clear line that blames whoever said it."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        key = ".".join(str(part) for part in error.errors()[0]["loc"])
        if origins is not None and origins_of(key, origins) == COMMAND_LINE:
            source = COMMAND_LINE
        raise UserError(f"{source}: {explain(error)}") from None


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


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


def _read(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """A file merged over those it extends."""
    path = path.resolve()
    if path in seen:
        raise UserError(f"{path.name}: 'extends' goes in a circle: {' → '.join(p.name for p in (*seen, path))}")
    data = _parse(path)
    if not isinstance(data, dict):
        raise UserError(f"{path.name}: a recipe is a mapping of sections, not {type(data).__name__}")
    base: dict[str, Any] = {}
    origins: dict[str, str] = {}
    parents = data.pop("extends", [])
    for parent in [parents] if isinstance(parents, str) else parents:
        other = path.parent / parent
        more, more_origins = _read(other if other.is_file() else find(parent), (*seen, path))
        _merge(base, more)
        origins.update(more_origins)
    _merge(base, data)
    origins.update({key: path.name for key, _ in flatten(data)})
    there = {key for key, _ in flatten(base)}  # what this file replaced is nobody's any more
    return base, {key: origin for key, origin in origins.items() if key in there}


def read_yaml(path: Path, what: str) -> Any:
    """What a YAML file holds; `what` it is, for error messages."""
    try:
        return yaml.load(read_text(path, what), _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{path.name} is not valid YAML: {' '.join(str(error).split())}") from None


def _parse(path: Path) -> Any:
    data = read_yaml(path, "recipe")
    if data is None:
        raise UserError(f"recipe '{path}' is empty; `upshot new recipe NAME` writes one to begin with")
    return data


def _merge(into: dict[str, Any], data: Mapping[str, Any]) -> None:
    for key, value in data.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict) and _same_thing(into[key], value):
            _merge(into[key], value)
        else:
            into[key] = value


def _same_thing(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two mappings configure the same named thing, so that options of the old one still apply."""
    return "name" not in new or new["name"] == old.get("name")


def _override(data: dict[str, Any], origins: dict[str, str], text: str) -> None:
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise UserError(f"override '{text}' should read key=value, such as train.lr=1e-5")
    try:
        value = yaml.load(raw, _Loader)
    except yaml.YAMLError:
        raise UserError(f"override '{key}': '{raw}' is not valid YAML") from None
    _put(data, origins, key, value, COMMAND_LINE)


def _put(data: dict[str, Any], origins: dict[str, str], key: str, value: Any, origin: str) -> None:
    """Set a value by its dotted key; a mapping from a call is laid over what is there."""
    node: Any = data
    parts = key.split(".")
    for position, part in enumerate(parts[:-1]):
        if isinstance(node, list):
            index = _index(node, part, ".".join(parts[:position]), origin)
            parts[position] = str(index)
            node = node[index]
        else:
            if isinstance(node.get(part), str) and part in ("task", "user", "manager"):
                node[part] = {"name": node[part]}  # the short form of a named thing
            if not isinstance(node.get(part), (dict, list)):
                node[part] = _own_list(parts[: position + 1]) if parts[position + 1] == ADD else {}
            node = node[part]
    where, last = ".".join(parts[:-1]), parts[-1]
    if isinstance(node, list) and last == ADD:
        parts[-1] = str(len(node))
        node.append(value)
    elif isinstance(node, list):
        index = _index(node, last, where, origin)
        parts[-1] = str(index)
        node[index] = value
    elif origin == CALL and isinstance(value, Mapping) and isinstance(node.get(last), dict | str | None):
        old = node.get(last)
        node[last] = old if isinstance(old, dict) else {"name": old} if isinstance(old, str) else {}
        _merge(node, {last: value})
    else:
        node[last] = value
    key = ".".join(parts)
    told = [f"{key}.{inner}" if inner else key for inner, _ in flatten(value)] if origin == CALL else [key]
    for old_key in [k for k in origins if any(k.startswith(f"{new}.") for new in told)]:
        del origins[old_key]
    origins.update(dict.fromkeys(told, origin))


def _own_list(path: Sequence[str]) -> list[Any]:
    """The list that a key has when the recipe does not set it, to be added to."""
    section = _model_at(Recipe, path[:-1])
    info = section.model_fields.get(path[-1]) if section is not None else None
    default = info.get_default(call_default_factory=True) if info is not None else None
    if not isinstance(default, list):
        raise UserError(f"override '{'.'.join(path)}.+=…' adds to a list, and '{'.'.join(path)}' is none")
    return [item.model_dump() if isinstance(item, BaseModel) else item for item in default]


def _index(items: list[Any], part: str, where: str, origin: str) -> int:
    """A list position: a number, or the name of a named item (reward.metrics.accuracy.weight=2)."""
    if part.isdigit() and int(part) < len(items):
        return int(part)
    known = [item.get("name", "") if isinstance(item, Mapping) else str(item) for item in items]
    if part in known:
        index = known.index(part)
        if not isinstance(items[index], Mapping):
            items[index] = {"name": part}
        return index
    raise UserError(f"{origin}: '{where}' has no item '{part}'; {did_you_mean(part, known)}")


def explain(error: ValidationError, root: type[BaseModel] = Recipe) -> str:
    """The first validation error as one line that names the key, the value and the way out."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        section = _model_at(root, path[:-1])
        known = section.model_fields if section is not None else {}
        place = f" in {'.'.join(path[:-1])}" if path[:-1] else ""
        return f"unknown key '{path[-1]}'{place}; {did_you_mean(path[-1], known)}"
    if first["type"] == "missing":
        return f"'{key}' is needed and not there"
    message = first["msg"].removeprefix("Value error, ")
    if isinstance(first["input"], Mapping) and first["type"] == "value_error":  # what two keys together mean
        return message
    return f"{key} = {first['input']!r}: {message[0].lower()}{message[1:]}"


def _is_default(recipe: Recipe, key: str) -> bool:
    """Whether the value at a dotted key is what it is without anybody's saying."""
    path = key.split(".")
    section = _model_at(Recipe, path[:-1])
    value: Any = recipe.model_dump(mode="json")
    for part in path:
        value = value[int(part)] if isinstance(value, list) else value.get(part)
    field_of = section.model_fields.get(path[-1]) if section is not None else None
    if field_of is None or field_of.is_required():
        return False
    default = field_of.get_default(call_default_factory=True)
    return bool(value == (list(default) if isinstance(default, tuple) else default))


def _model_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    parts = iter(path)
    for part in parts:
        if part.isdigit():
            continue
        info = model.model_fields.get(part)
        if info is None:
            return None
        found = models_in(info.annotation)
        if not found:
            return None
        model = found[0]
        if getattr(info.annotation, "__origin__", None) is dict:
            next(parts, None)  # the name of one of them
    return model
