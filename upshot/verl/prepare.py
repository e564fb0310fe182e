"""What must lie ready before verl starts: the recipe, the rows as parquet, and what was measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from upshot.config.recipe import Recipe
from upshot.core.conversation import Conversation, Row
from upshot.models.local import load_tokenizer, local_path
from upshot.rollout.play import has_opening
from upshot.rollout.prompt_length import filter_rows
from upshot.verl.parquet import write_rows
from upshot.verl.plan import ClusterPlace
from upshot.verl.sft import prepare_sft
from upshot.verl.worker import RolloutWorker


def prepare(recipe: Recipe, folder: Path) -> ClusterPlace:
    """Write the rows of a recipe under a run folder; what was measured on the way."""
    context = context_of(recipe)
    worker = RolloutWorker(recipe, load_tokenizer(recipe.model.path), context)
    if recipe.train.method == "sft":
        return prepare_sft(recipe, folder, worker.renderer, context)
    task, held_out, rule = worker.book.task, recipe.eval.split, recipe.episode.long_prompts
    rows = {"train": task.rows("train"), held_out: task.rows(held_out)[: recipe.eval.rows]}
    rows = {split: filter_rows(own, worker.lengths, rule) for split, own in rows.items()}
    write_rows(folder / "data" / "train.parquet", rows["train"], "train")
    write_rows(folder / "data" / "validation.parquet", rows[held_out], held_out)
    longest = longest_prompt(worker, [row for own in rows.values() for row in own])
    return ClusterPlace(str(folder.resolve()), len(rows["train"]), min(longest, context - 1), context)


def longest_prompt(worker: RolloutWorker, rows: Sequence[Row]) -> int:
    """Ids of the longest prompt, as the policy will be shown it; as many as it takes where somebody speaks first."""
    if not all(map(has_opening, rows)):
        return worker.context.policy.max_context
    return max(worker.context.policy.prompt_tokens(Conversation(row)) for row in rows)


def context_of(recipe: Recipe) -> int:
    """Most ids that the model takes."""
    from transformers import AutoConfig

    if recipe.model.max_context:
        return recipe.model.max_context
    found = AutoConfig.from_pretrained(local_path(recipe.model.path)).get_text_config()
    return int(found.max_position_embeddings)
