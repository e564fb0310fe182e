"""YAML + dotted overrides → a checked recipe that knows where each value came from."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from upshot.config.layers import (
    CALL,
    COMMAND_LINE,
    DEFAULT,
    Sourced,
    find_origin,
    flatten,
    leaves,
    merge,
    put,
    tag,
    untag,
)
from upshot.config.recipe import Recipe
from upshot.config.recipe.recipe import OWN_CODE
from upshot.config.recipe.reward import list_metrics
from upshot.config.registry import look_in, path_of
from upshot.config.unread import describe_unread
from upshot.config.validation import explain_error, field_at, first_error
from upshot.config.yaml_text import parse_yaml
from upshot.core.errors import UserError, near
from upshot.core.files import read_text, suggest_neighbour

_CHECKOUT = Path(__file__).parents[2] / "recipes"
RECIPES = _CHECKOUT if _CHECKOUT.is_dir() else Path(sys.prefix) / "share" / "upshot" / "recipes"
"""The recipes of the checkout, or those an installed wheel brought along."""


@dataclass
class ResolvedRecipe:
    """A resolved recipe and the origin of each value, by dotted key."""

    recipe: Recipe
    origins: dict[str, str] = field(default_factory=dict)

    def origin(self, key: str) -> str:
        """Where a value came from: the command line, a call's arguments, a file, or the default.

        Where a section is given in its short form (`models.judge: URL#name`), keys that the form does not set are
        defaults.
        """
        if key not in self.origins and _is_default(self.recipe, key):
            return DEFAULT
        return find_origin(key, self.origins)

    def unread(self) -> list[str]:
        """A message for each key without effect that is set on the command line or in a call. A file may set such keys,
        because several recipes may share it."""
        asked = [(name, origin) for name, origin in self.origins.items() if origin in (COMMAND_LINE, CALL)]
        messages = describe_unread(self.recipe).items()
        return [
            f"{origin}: {says}" for key, says in messages for name, origin in asked if f"{name}.".startswith(f"{key}.")
        ]


def load_recipe(
    recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = (), may_idle: bool = False
) -> ResolvedRecipe:
    """A recipe by name, by path or as a mapping, with overrides: `key=value` texts, or values by (dotted) key.

    may_idle: allow overrides without effect. In a sweep, some runs may not read one of them.
    """
    if isinstance(recipe, Mapping):
        source, tree = "recipe", tag(_plain(recipe), "recipe")
    else:
        path = find_recipe(str(recipe))
        source, tree = str(path), _read_recipe(path, ())
        _find_files(tree, path)
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            put(tree, key, _plain(value), CALL)
    else:
        for override in overrides:
            key, equals, raw = override.partition("=")
            if not equals or not key:
                raise UserError(f"override '{override}' should read key=value, such as train.lr=1e-5")
            put(tree, key, read_value(key, raw), COMMAND_LINE)
    # `train.steps` of the command line or a call replaces `train.epochs` of a file, and the other way round.
    train = tree.get("train")
    other = {"steps": ("epochs", None), "epochs": ("steps", 0)}
    lengths = {key: train[key] for key in other if isinstance(train, dict) and isinstance(train.get(key), Sourced)}
    asked = [key for key, length in lengths.items() if length.origin in (COMMAND_LINE, CALL)]
    if len(asked) == 1 and len(lengths) == 2:
        replaced, unset = other[asked[0]]
        train[replaced] = Sourced(unset, lengths[asked[0]].origin)
    origins = {key: leaf.origin for key, leaf in leaves(tree)}
    loaded = ResolvedRecipe(validate_recipe(untag(tree), source, origins), origins)
    if not may_idle and (unread := loaded.unread()):
        raise UserError(unread[0])
    for folder in loaded.recipe.code:
        look_in(Path(folder))
    return loaded


def _find_files(tree: dict[str, Any], path: Path) -> None:
    """Make paths beside the recipe (its serve file, your own code) absolute, so that a resumed run finds them too."""
    folder = path.resolve().parent
    serve, code = tree.get("serve"), tree.get("code")
    if isinstance(serve, Sourced) and isinstance(serve.value, str):
        tree["serve"] = replace(serve, value=str(folder / Path(serve.value).expanduser()))
    if isinstance(code, Sourced) and isinstance(code.value, list):
        tree["code"] = replace(code, value=[str(folder / place) for place in code.value])
    elif code is None and folder != RECIPES:
        words = (w for _, leaf in leaves(tree) for w in (leaf.value if isinstance(leaf.value, list) else [leaf.value]))
        if any(OWN_CODE.fullmatch(str(word)) for word in words):
            tree["code"] = Sourced([str(folder)], path.name)


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


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe: a path, a run folder, or the name of one that ships with the project."""
    path = Path(name_or_path)
    if (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    if path.suffix in (".yaml", ".yml"):
        for candidate in (path, RECIPES / path.name if path.parent.name in ("", "recipes") else path):
            if candidate.is_file():
                return candidate
        raise UserError(f"recipe '{name_or_path}': no such file{_suggest(path)}")
    shipped = RECIPES / f"{name_or_path}.yaml"
    if shipped.is_file():
        return shipped
    if len(path.parts) > 1 or path.is_dir():
        raise UserError(
            f"'{name_or_path}' is neither a recipe nor a run folder (it has no recipe.yaml){_suggest(path)}"
        )
    raise UserError(f"unknown recipe '{name_or_path}'{_suggest(path)}")


def _suggest(path: Path) -> str:
    """The nearest name, among the neighbours of a path and the recipes that ship; else how to list the latter."""
    if neighbour := suggest_neighbour(path):
        return neighbour
    if name := near(path.stem, list_recipes()):
        return f"; did you mean '{name}'?"
    return "; `upshot recipe list` names those that ship, and a path to a .yaml file or a run folder works, too"


def list_recipes() -> list[str]:
    """The recipes that ship with the project."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def describe_recipe(path: Path) -> str:
    """A recipe's own first comment line."""
    lines = path.read_text("utf-8").splitlines()
    comments = (line.lstrip("# ").strip() for line in lines if line.startswith("#"))
    return next((text for text in comments if text and not text.startswith("yaml-language-server")), "")


def validate_recipe(
    data: Mapping[str, Any], source: str = "recipe", origins: Mapping[str, str] | None = None
) -> Recipe:
    """Check types and keys; an error becomes one clear line that names its source."""
    unreadable = next((key for key, value in flatten(data) if isinstance(value, str) and "\0" in value), None)
    if unreadable is not None:  # no name and no path can have one
        raise UserError(f"{source}: {unreadable} contains the character NUL; remove it")
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        key = ".".join(map(str, first_error(error)["loc"]))
        inside = [origin for name, origin in (origins or {}).items() if f"{name}.".startswith(f"{key}.")]
        if COMMAND_LINE in (inside or [find_origin(key, origins or {})]):
            source = COMMAND_LINE
        raise UserError(f"{source}: {explain_error(error, Recipe)}") from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_recipe(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """A file merged over those it extends; its values know their files."""
    path = path.resolve()
    if path in seen:
        raise UserError(f"{path.name}: 'extends' is circular: {' → '.join(p.name for p in (*seen, path))}")
    data = read_yaml(path, "recipe")
    if data is None:
        raise UserError(f"recipe '{path}' is empty; `upshot new recipe NAME` writes one to start from")
    if not isinstance(data, dict):
        raise UserError(f"{path.name}: a recipe is a mapping of sections, not {type(data).__name__}")
    if isinstance(data.get("reward"), dict) and "metrics" in data["reward"]:
        data["reward"]["metrics"] = list_metrics(data["reward"]["metrics"])  # whose items overrides can name
    base: dict[str, Any] = {}
    parents = data.pop("extends", [])
    for parent in [parents] if isinstance(parents, str) else parents:
        other = path.parent / parent
        merge(base, _read_recipe(other if other.is_file() else find_recipe(parent), (*seen, path)))
    merge(base, tag(data, path.name))
    return base


def read_yaml(path: Path, what: str) -> Any:
    """What a YAML file holds; `what` it is, for error messages."""
    try:
        return parse_yaml(read_text(path, what))
    except yaml.YAMLError as error:
        raise _yaml_error(path, error) from None


def _yaml_error(path: Path, error: yaml.YAMLError) -> UserError:
    """What is wrong with a YAML file, with the line and a caret under the place."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return UserError(f"{path.name} is not valid YAML: {' '.join(str(error).split())}")
    problem = str(getattr(error, "problem", "") or "cannot be read")
    line = read_text(path, "recipe").splitlines()[mark.line : mark.line + 1]
    if "'\\t'" in problem or (line and line[0][: mark.column + 1].endswith("\t")):
        problem = "a tab; YAML is indented with spaces"
    known = UserError(f"{path.name} is not valid YAML: {problem} (line {mark.line + 1}, column {mark.column + 1})")
    if line:  # a tab is drawn as one character, so that the caret stands below it
        known.excerpt = f"{line[0].replace(chr(9), '→')}\n{' ' * mark.column}^"
    return known


def read_value(key: str, raw: str) -> Any:
    """The value of an override, as YAML gives it."""
    try:
        return parse_yaml(raw)
    except yaml.YAMLError as error:
        why = str(getattr(error, "problem", "") or "cannot be read")
        raise UserError(f"override '{key}': '{raw[:60]}' is not valid YAML: {why}") from None


def _is_default(recipe: Recipe, key: str) -> bool:
    """Whether the value at a dotted key is what it is without anybody's saying."""
    path = key.split(".")
    value: Any = recipe.model_dump(mode="json")
    for part in path:
        value = value[int(part)] if isinstance(value, list) else value.get(part)
    info = field_at(Recipe, path)
    if info is None or info.is_required():
        return False
    default = info.get_default(call_default_factory=True)
    return bool(value == (list(default) if isinstance(default, tuple) else default))
