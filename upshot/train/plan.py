"""What a recipe would do, in words: `upshot train RECIPE --dry-run`."""

from __future__ import annotations

from upshot.errors import UserError
from upshot.recipe import Recipe, TrainConfig
from upshot.tasks.base import Task, tasks
from upshot.train.examples import read_dialogues, read_preferences
from upshot.train.setup import check_names


def plan(recipe: Recipe) -> str:
    """Check every name, file and row, and describe the run; nothing is loaded or written."""
    check_names(recipe)
    config = recipe.train
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    lines = [f"recipe     {recipe.name}, seed {recipe.seed}"]
    lines.append(f"policy     {recipe.model.path or 'a new tiny model'}{', LoRA' if recipe.model.lora else ''}")
    if config.method in ("rl", "online-dpo", "ppo"):
        examples = len(task.rows("train"))
        lines += _rollouts(recipe, examples)
    else:
        examples = _examples(config, task)
        lines.append(f"data       {config.data or recipe.task.name}: {examples} examples")
    steps = config.lasting(examples).steps
    passes = f" (at most {config.epochs:g} epochs)" if config.epochs is not None else ""
    lines.append(f"training   {config.method}, {steps} steps{passes}, learning rate {config.lr:g} ({config.schedule})")
    for role, spec in recipe.models.items():
        lines.append(f"model      {role}: {spec.url or spec.model}")
    return "\n".join(lines)


def _examples(config: TrainConfig, task: Task) -> int:
    """How many dialogues or pairs there are to learn from."""
    if config.method == "dpo":
        if config.data is None:
            raise UserError("train.method 'dpo' needs train.data; make it with `upshot data prepare --for dpo`")
        return len(read_preferences(config.data, config.min_gap))
    return len(read_dialogues(config.data) if config.data else task.dialogues("train"))


def _rollouts(recipe: Recipe, rows: int) -> list[str]:
    config, futures = recipe.train, recipe.futures
    replies = config.prompts_per_step * config.group_size
    played = futures.samples if futures.window else 1
    metrics = ", ".join(f"{m.name} x {m.weight:g}" for m in recipe.reward.metrics)
    return [
        f"task       {recipe.task.name}: {rows} training rows",
        f"a step     {config.prompts_per_step} prompts x {config.group_size} replies of up to "
        f"{recipe.episode.max_turns} turn(s) = {replies} replies",
        f"futures    {played} per reply, window {futures.window}: up to {replies * played * futures.window} user turns "
        f"and as many policy turns a step",
        f"reward     {metrics}: {replies * played * len(recipe.reward.metrics)} scores a step",
    ]
