"""The paths in a recipe: made absolute, because verl's processes run in Ray's folders, and listed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from upshot.config.layers import flatten
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.models.local import local_path
from upshot.run.folder import with_whole_paths

OWN = ("name", "run_dir")
"""Keys whose values are not paths that must exist."""


def make_absolute(recipe: Recipe) -> Recipe:
    """The recipe with every relative path as an absolute one, and names of models as the folders behind them."""
    absolute = with_whole_paths(recipe)
    local = {role: spec for role, spec in absolute.models.items() if spec.kind == "local"}
    models = {role: spec.model_copy(update={"model": _find_folder(spec.model)}) for role, spec in local.items()}
    model = absolute.model.model_copy(update={"path": _find_folder(absolute.model.path).removeprefix("local:")})
    return absolute.model_copy(update={"model": model, "models": {**absolute.models, **models}})


def list_paths(recipe: Recipe) -> list[tuple[str, str]]:
    """Files and folders that workers read, with the keys that name them."""
    values = [(key, value) for key, value in flatten(recipe.model_dump(mode="json")) if key not in OWN]
    words = [(key, word) for key, value in values for word in (value if isinstance(value, list) else [value])]
    return sorted({(k, w) for k, w in words if isinstance(w, str) and Path(w).is_absolute() and Path(w).exists()})


def _find_folder(model: str) -> str:
    """The folder of a model; a hub name stays a name, and the checks report its problems."""
    with suppress(UserError):
        if model and (path := Path(local_path(model))).is_dir():
            return str(path.resolve())
    return model
