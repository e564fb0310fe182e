"""The checkpoints that verl saves in a run folder, and each of them as one that every other command reads."""

from __future__ import annotations

import re
from pathlib import Path

from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.run.folder import RunFolder
from upshot.verl.merge import write_merged

MARK = "verl.txt"
"""Written by a run on verl alone: both sides of its config."""
NEWEST = "latest_checkpointed_iteration.txt"
"""Where verl says which checkpoint is whole; the last file of it to be written."""
STEP = re.compile(r"global_step_(\d+)")


def is_verl(folder: RunFolder) -> bool:
    """Whether a run was made by verl."""
    return (folder.path / MARK).is_file()


def newest_step(folder: RunFolder) -> int:
    """The step of the newest whole checkpoint; 0 before the first."""
    path = folder.checkpoints.path / NEWEST
    step = int(path.read_text().strip() or 0) if path.is_file() else 0
    return step if step and shards_of(folder, step).is_dir() else 0


def saved_steps(folder: RunFolder) -> list[int]:
    """The steps of the whole checkpoints, oldest first."""
    found = [STEP.fullmatch(path.name) for path in folder.checkpoints.path.glob("global_step_*")]
    steps = sorted(int(match[1]) for match in found if match)
    # Of those beyond train.save.keep verl removes the shards and leaves the folder.
    return [step for step in steps if step <= newest_step(folder) and any(shards_of(folder, step).glob("model_*.pt"))]


def shards_of(folder: RunFolder, step: int) -> Path:
    """The shards of the policy: verl's PPO trainer saves an actor, its SFT trainer the model alone."""
    path = folder.checkpoints.path / f"global_step_{step}"
    return path / "actor" if (path / "actor").is_dir() else path


def make_whole(folder: RunFolder, wanted: str = "") -> Path | None:
    """A checkpoint of verl's as a Hugging Face folder beside it, where it is not yet; None when there is none at all.

    `wanted`: a step or a name such as rl-000040; else the newest.
    """
    recipe, steps = folder.recipe(), saved_steps(folder)
    step = _step(wanted, recipe, steps)
    if step is None:
        return None
    return folder.checkpoints.save(
        recipe.train.method,
        step,
        max(len(folder.checkpoints.saved()), recipe.train.save.keep) + 1,  # what somebody asked for stays
        lambda to: write_merged(shards_of(folder, step), to, recipe.model.path),
    )


def _step(wanted: str, recipe: Recipe, steps: list[int]) -> int | None:
    names = {name: step for step in steps for name in (str(step), f"{recipe.train.method}-{step:06d}")}
    if wanted not in ("", "last", "best"):
        return names.get(wanted)
    return steps[-1] if steps else None


def check_ranks(folder: RunFolder, ranks: int) -> None:
    """Refuse to go on with another number of ranks: each reads the shard it saved."""
    from upshot.verl.merge import world_size

    step = newest_step(folder)
    if step and (before := world_size(shards_of(folder, step))) != ranks:
        raise UserError(
            f"checkpoint global_step_{step} of '{folder.path}' was saved by {before} ranks and there are {ranks} now; "
            f"set trainer.n_gpus_per_node and trainer.nnodes as they were, or export it and begin a new run from it"
        )
