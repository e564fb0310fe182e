"""Going on with a run that verl made: the same folder, its newest checkpoint, the words that verl was given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.core.files import write_atomic, write_json
from upshot.run.folder import RunFolder
from upshot.run.resume import resumed_recipe
from upshot.verl.checkpoints import MARK, check_ranks, is_verl, newest_step
from upshot.verl.plan import VerlPlan, VerlSetting, is_theirs

WORDS = "verl.json"
"""verl's own words of the command line, which a resumed run keeps."""


def reopen_run(path: Path, words: Sequence[str]) -> tuple[Recipe, list[str], RunFolder]:
    """The recipe, verl's words and the folder of a run to go on with; `words` are of the new command line and win."""
    folder = RunFolder.open(path)
    if not is_verl(folder):
        raise UserError(f"'{path}' is a run of local mode; go on with it without --engine verl")
    recipe = resumed_recipe(folder, [word for word in words if not is_theirs(word)])
    before = json.loads((path / WORDS).read_text()) if (path / WORDS).is_file() else []
    return recipe, [*before, *(word for word in words if is_theirs(word))], folder


def refuse_verl(folder: RunFolder) -> None:
    """Local mode cannot go on with a run of verl's: its checkpoints are others."""
    if is_verl(folder):
        raise UserError(
            f"'{folder.path}' is a run of verl; go on with  upshot train --engine verl --resume {folder.path}, or "
            f"begin a new run from its model (upshot export {folder.path})"
        )


def begin_folder(folder: RunFolder, recipe: Recipe, plan: VerlPlan, theirs: Sequence[str]) -> None:
    """Leave in the folder what the run is made by, from now on; refuse what its checkpoint does not fit."""
    check_ranks(folder, plan.ranks)
    if recipe != folder.recipe:
        folder.write_recipe(recipe)
    write_json(folder.path / WORDS, list(theirs))
    write_atomic(folder.path / MARK, f"{plan.page()}\n".encode())


def skip_first_validation(plan: VerlPlan, folder: RunFolder) -> VerlPlan:
    """The plan of a run that has a checkpoint: what was looked at before the first step is not looked at again."""
    key = "trainer.val_before_train"
    if not newest_step(folder) or plan.value(key) is None:
        return plan
    kept = [setting for setting in plan.settings if setting.key != key]
    again = VerlSetting(key, False, "resumed: the model was looked at when its checkpoint was saved")
    return replace(plan, settings=(*kept, again))
