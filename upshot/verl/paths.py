"""What a recipe names on this machine's disk: made absolute, since verl's processes run in Ray's folders, and listed.

A word is taken for a path where it names something that is there and looks like a path (a separator, a suffix), or
where only a model can stand. Nothing is guessed of words that name nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from upshot.config.layers import flatten
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.models.local import local_path

OWN = ("name", "run_dir")
"""Keys whose words are no paths that must be there."""
MODELS = ("model.path", "models.")


def make_absolute(recipe: Recipe) -> Recipe:
    """The recipe with every relative path as an absolute one, and the model's name as the folder behind it."""
    data = _walk(recipe.model_dump(mode="json"), "")
    if recipe.model.path:
        with suppress(UserError):  # what is wrong with it the checks say
            found = local_path(recipe.model.path)
            data["model"]["path"] = str(Path(found).resolve()) if Path(found).is_dir() else found
    return Recipe.model_validate(data)


def list_paths(recipe: Recipe) -> list[tuple[str, str]]:
    """Files and folders that workers read, with the keys that name them."""
    return sorted({(key, word) for key, word in _words(recipe) if Path(word).is_absolute() and Path(word).exists()})


def _words(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for key, value in flatten(recipe.model_dump(mode="json")):
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, str) and key not in OWN:
                yield key, word


def _walk(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _walk(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_walk(inner, key) for inner in value]
    if isinstance(value, str) and key not in OWN and _is_path(value, key):
        return str(Path(value).expanduser().resolve())
    return value


def _is_path(word: str, key: str) -> bool:
    path = Path(word).expanduser()
    if "\n" in word or len(word) > 1000 or not word or not path.exists():
        return False
    if key.startswith(MODELS):
        return (path / "config.json").is_file() or (path / "checkpoints").is_dir() or path.is_file()
    return "/" in word or bool(path.suffix)
