"""One stage of a demonstration: a recipe with a few changes, trained in a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upshot.config.load import validate_recipe
from upshot.config.recipe import Recipe
from upshot.run.reporter import Reporter


def train_stage(
    recipe: Recipe, name: str, folder: Path, reporter: Reporter, changes: Mapping[str, Any], start: Path | None = None
) -> Path:
    """Train the recipe with `changes` (by section or section.field) and return its last checkpoint.

    With `start` it goes on from that checkpoint, without a warm start of its own.
    """
    from upshot.run.run import train

    data = recipe.model_dump() | {"run_dir": str(folder), "name": name}
    if start is not None:
        data["warm_start"], data["model"]["path"] = None, str(start)
    for key, value in changes.items():
        section, _, field = key.partition(".")
        if field:
            data[section][field] = value
        else:
            data[section] = value
    latest = train(validate_recipe(data), None, reporter).latest()
    assert latest is not None
    return latest.path
