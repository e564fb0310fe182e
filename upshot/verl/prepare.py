"""Prepares what verl needs before it starts: the model it begins with, the rows, and measurements of them.

Local mode itself makes a new tiny model and a warm start, once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from upshot.config.phases import WARM_START, phases_of
from upshot.config.recipe import Recipe
from upshot.core.conversation import Conversation
from upshot.models.local import load_tokenizer, local_path
from upshot.rollout.play import has_opening
from upshot.rollout.prompt_length import filter_rows
from upshot.run.export import merge_adapter, write_new_folder
from upshot.run.folder import RunFolder
from upshot.tasks.datasets.splits import fingerprint
from upshot.verl.plan import ClusterPlace
from upshot.verl.rows import write_rows
from upshot.verl.worker import RolloutWorker

WEIGHTS = "adapter_model.safetensors"


def prepare(recipe: Recipe, folder: Path) -> ClusterPlace:
    """Write the rows of a recipe into a run folder; returns what was measured on the way."""
    context = context_of(recipe)
    worker = RolloutWorker(recipe, load_tokenizer(recipe.model.path), context)
    task, held_out, rule = worker.rows.task, recipe.eval.split, recipe.episode.long_prompts
    rows = {"train": task.rows("train"), held_out: task.rows(held_out)[: recipe.eval.rows]}
    rows = {split: filter_rows(split_rows, worker.lengths, rule) for split, split_rows in rows.items()}
    write_rows(folder / "data" / "train.json", rows["train"], "train")
    write_rows(folder / "data" / "validation.json", rows[held_out], held_out)
    # The longest prompt as the policy will see it; the maximum that it accepts if the user speaks first.
    policy, both = worker.context.policy, [row for split_rows in rows.values() for row in split_rows]
    longest = policy.max_context
    if all(map(has_opening, both)):
        longest = max(policy.prompt_tokens(Conversation(row)) for row in both)
    return ClusterPlace(str(folder.resolve()), len(rows["train"]), min(longest, context - 1), context)


def context_of(recipe: Recipe) -> int:
    """The maximum number of ids that the model accepts."""
    from transformers import AutoConfig

    if recipe.model.max_context:
        return recipe.model.max_context
    return int(AutoConfig.from_pretrained(local_path(recipe.model.path)).get_text_config().max_position_embeddings)


def needs_start(recipe: Recipe) -> bool:
    """Whether a model must be made before verl can start."""
    return not recipe.model.path or phases_of(recipe)[0] == WARM_START


def make_start(recipe: Recipe, folder: Path, say: Callable[[str], None] = print, resumed: bool = False) -> Recipe:
    """The recipe as verl runs it: its model is on disk, after its warm start. A model in the run folder is reused.

    A resumed run uses that model even if the recipe has changed since.
    """
    if not needs_start(recipe):
        return _merge_start(recipe, folder, say)
    first = start_recipe(recipe, folder)
    place = RunFolder(Path(first.run_dir))
    made = place.latest() if (place.path / "recipe.yaml").is_file() and (resumed or place.recipe == first) else None
    if made is None or made.phase == WARM_START:
        from upshot.run.run import train

        shutil.rmtree(place.path, ignore_errors=True)
        say(f"creating the model that verl starts from, in {place.path}")
        made = train(first).latest()
    assert made is not None
    return _merge_start(_with_model(recipe, made.path), folder, say)


def _with_model(recipe: Recipe, path: Path) -> Recipe:
    model = recipe.model.model_copy(update={"path": str(path.resolve())})
    return recipe.model_copy(update={"warm_start": None, "model": model})


def _merge_start(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> Recipe:
    """The recipe with a merged model as its start: verl cannot load an adapter, such as that of an earlier LoRA run."""
    start = Path(local_path(recipe.model.path))
    if not (start / "adapter_config.json").is_file():
        return recipe
    merged = folder / "merged-start" / fingerprint(f"{start.resolve()} {(start / WEIGHTS).stat().st_mtime_ns}")
    if not merged.is_dir():
        say(f"merging the adapter {start} into its base model, in {merged}")
        write_new_folder(merged, lambda to: merge_adapter(start, to))
    return _with_model(recipe, merged)


def start_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """The part of the recipe that local mode runs, as a run in a separate folder."""
    nothing = recipe.train.model_copy(update={"steps": 0, "epochs": None})
    quiet = recipe.eval.model_copy(update={"every": 0})
    return recipe.model_copy(update={"run_dir": str(folder / WARM_START), "train": nothing, "eval": quiet})
