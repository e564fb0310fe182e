"""The model that verl begins with: a new tiny one and a warm start are made before, once, by local mode itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from upshot.config.phases import WARM_START, phases_of
from upshot.config.recipe import Recipe
from upshot.run.folder import RunFolder


def needs_start(recipe: Recipe) -> bool:
    """Whether there is a model to make before verl can begin."""
    return not recipe.model.path or phases_of(recipe)[0] == WARM_START


def make_start(recipe: Recipe, folder: Path, say: Callable[[str], None] = print, resumed: bool = False) -> Recipe:
    """The recipe as verl runs it: its model is on disk, and warm. What a run folder has of it is not made again.

    A resumed run has it, whatever of the recipe has changed since.
    """
    if not needs_start(recipe):
        return recipe
    own = start_recipe(recipe, folder)
    place = RunFolder(Path(own.run_dir))
    made = place.latest() if (place.path / "recipe.yaml").is_file() and (resumed or place.recipe() == own) else None
    if made is None or made.phase == WARM_START:
        from upshot.run.run import train

        shutil.rmtree(place.path, ignore_errors=True)
        say(f"making the model that verl begins with, in {place.path}")
        made = train(own).latest()
    assert made is not None
    model = recipe.model.model_copy(update={"path": str(made.path.resolve())})
    return recipe.model_copy(update={"warm_start": None, "model": model})


def start_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """The part of the recipe that local mode runs, as a run in a folder of its own."""
    nothing = recipe.train.model_copy(update={"steps": 0, "epochs": None})
    quiet = recipe.eval.model_copy(update={"every": 0})
    return recipe.model_copy(update={"run_dir": str(folder / WARM_START), "train": nothing, "eval": quiet})
