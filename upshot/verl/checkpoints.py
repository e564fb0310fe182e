"""The checkpoints that verl saves in a run folder: converted for all other commands, and used for resuming."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from upshot.config.load import dump_recipe
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.core.files import write_atomic, write_json
from upshot.models.local import load_tokenizer, local_path
from upshot.run.export import merge_adapter, write_new_folder
from upshot.run.folder import RunFolder, with_whole_paths
from upshot.run.resume import resumed_recipe
from upshot.serving.servers.state import with_addresses
from upshot.verl.checks.resources import is_joined
from upshot.verl.merge import LORA, read_shards, write_merged
from upshot.verl.plan import WORKERS, VerlPlan, VerlSetting, is_theirs

MARK = "verl.txt"
"""A file that only a run on verl writes: both sides of its config."""
NEWEST = "latest_checkpointed_iteration.txt"
"""The file that names the newest complete checkpoint; verl writes it last."""
WORDS = "verl.json"
"""The overrides for verl on the command line, which a resumed run keeps."""
STEP = re.compile(r"global_step_(\d+)")


def is_verl(folder: RunFolder) -> bool:
    """Whether a run was made by verl."""
    return (folder.path / MARK).is_file()


def newest_step(folder: RunFolder) -> int:
    """The step of the newest complete checkpoint; 0 before the first."""
    path = folder.checkpoints.path / NEWEST
    step = int(path.read_text().strip() or 0) if path.is_file() else 0
    return step if step and shards_of(folder, step).is_dir() else 0


def saved_steps(folder: RunFolder) -> list[int]:
    """The steps of the complete checkpoints, oldest first."""
    matches = [STEP.fullmatch(path.name) for path in folder.checkpoints.path.glob("global_step_*")]
    steps = sorted(int(match[1]) for match in matches if match)
    # Beyond train.save.keep, verl removes the shards of a checkpoint and leaves its folder.
    return [step for step in steps if step <= newest_step(folder) and any(shards_of(folder, step).glob("model_*.pt"))]


def shards_of(folder: RunFolder, step: int) -> Path:
    """The shards of the policy: verl's PPO trainer saves an actor, its SFT trainer only the model."""
    path = folder.checkpoints.path / f"global_step_{step}"
    return path / "actor" if (path / "actor").is_dir() else path


def make_whole(folder: RunFolder, wanted: str = "") -> Path | None:
    """Convert a checkpoint of verl's to a Hugging Face folder beside it, if not done yet; None if there is none at all.

    `wanted`: a step or a name such as rl-000040; default: the newest.
    """
    recipe, steps = folder.recipe, saved_steps(folder)
    names = {name: step for step in steps for name in (str(step), f"{recipe.train.method}-{step:06d}")}
    step = next(reversed(steps), None) if wanted in ("", "last", "best") else names.get(wanted)
    if step is None:
        return None
    return folder.checkpoints.save(
        recipe.train.method,
        step,
        max(len(folder.checkpoints.saved()), recipe.train.save.keep) + 1,  # a requested checkpoint is kept
        lambda to: write_merged(shards_of(folder, step), to, recipe.model.path),
    )


def check_ranks(folder: RunFolder, ranks: int) -> None:
    """Refuse to resume with a different number of ranks: each reads the shard that it saved."""
    from upshot.verl.merge import world_size

    step = newest_step(folder)
    if step and (before := world_size(shards_of(folder, step))) != ranks:
        raise UserError(
            f"checkpoint global_step_{step} of '{folder.path}' was saved by {before} ranks and there are {ranks} now; "
            f"set trainer.n_gpus_per_node and trainer.nnodes as before, or export it and start a new run from it"
        )


def find_shards(folder: Path, wanted: str = "") -> Path | None:
    """The shards in a folder of verl or a fork of it: directly, in `actor`, or those of the newest step."""
    steps = {int(match[1]): path for path in folder.glob("global_step_*") if (match := STEP.fullmatch(path.name))}
    chosen = [path for step, path in sorted(steps.items(), reverse=True) if wanted in ("", "last", str(step))]
    places = [place / inner for place in (folder, *chosen) for inner in ("", "actor")]
    return next((place for place in places if any(place.glob("model_world_size_*.pt"))), None)


def export_shards(shards: Path, model: str, merge: bool, out: Path) -> None:
    """Write a model that verl trained without us as a Hugging Face folder; `model`: the model it was made from.

    `model` is needed for adapters, which name their base, and if there is no config or tokenizer beside the shards.
    """
    adapted = any(map(LORA.match, read_shards(shards)[0]))
    bare = not (shards / "huggingface" / "config.json").is_file()
    if not model and (adapted or bare):
        what = "holds adapters" if adapted else "has no huggingface/config.json beside its shards"
        raise UserError(f"'{shards}' {what}: name the model it was made from with --model NAME|FOLDER")

    def write(to: Path) -> None:
        if bare:
            from transformers import AutoConfig

            AutoConfig.from_pretrained(local_path(model)).save_pretrained(to)
            load_tokenizer(model).save_pretrained(to)
        write_merged(shards, to, model)

    def write_all_in_one(to: Path) -> None:
        with TemporaryDirectory() as adapters:
            write(Path(adapters))
            merge_adapter(Path(adapters), to)

    write_new_folder(out, write_all_in_one if merge and adapted else write)


def reopen_run(path: Path, words: Sequence[str]) -> tuple[Recipe, list[str], RunFolder]:
    """The recipe, verl's overrides and the folder of a run to resume; `words` of the new command line override them."""
    folder = RunFolder.open(path)
    if not is_verl(folder):
        raise UserError(f"'{path}' is a run of local mode; resume it without --engine verl")
    recipe = resumed_recipe(folder, [word for word in words if not is_theirs(word)])
    before = json.loads((path / WORDS).read_text()) if (path / WORDS).is_file() else []
    return recipe, [*before, *(word for word in words if is_theirs(word))], folder


def refuse_verl(folder: RunFolder) -> None:
    """Refuse a run of verl: local mode cannot read its checkpoints."""
    if is_verl(folder):
        raise UserError(
            f"'{folder.path}' is a run of verl; resume it with  upshot train --engine verl --resume {folder.path}, or "
            f"start a new run from its model (upshot export {folder.path})"
        )


def begin_folder(folder: RunFolder, recipe: Recipe, plan: VerlPlan, theirs: Sequence[str]) -> None:
    """Record the recipe and settings of the run in its folder; refuse settings that do not fit its checkpoint."""
    check_ranks(folder, plan.ranks)
    if recipe != folder.recipe:
        folder.write_recipe(recipe)
    models = with_addresses(recipe.serve, recipe.models, from_elsewhere=is_joined(plan.value))
    worker_recipe = recipe.model_copy(update={"models": models, "serve": None})
    write_atomic(folder.path / WORKERS, dump_recipe(with_whole_paths(worker_recipe)).encode())
    write_json(folder.path / WORDS, list(theirs))
    write_atomic(folder.path / MARK, f"{plan.page()}\n".encode())


def skip_first_validation(plan: VerlPlan, folder: RunFolder) -> VerlPlan:
    """The plan of a run that has a checkpoint: checks made before the first step are not repeated."""
    key = "trainer.val_before_train"
    if not newest_step(folder) or plan.value(key) is None:
        return plan
    kept = [setting for setting in plan.settings if setting.key != key]
    again = VerlSetting(key, False, "resumed: the model was looked at when its checkpoint was saved")
    return replace(plan, settings=(*kept, again))
