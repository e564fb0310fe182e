"""How long a run would take: estimated from steps that were measured, or from a rate that is stated; never guessed.

The newest earlier run of the same model and method on this machine says how long its steps took. They are scaled by
how many tokens the policy samples in a step (for a method that samples nothing: by the examples of a step).
"""

from __future__ import annotations

import platform
import statistics
from contextlib import suppress

from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.run.console import duration
from upshot.run.folder import VERSIONS, RunFolder, find_shown, place_of
from upshot.training.setup import find_context

RUNS_READ = 20
"""The newest runs that are looked through for one that compares."""


def sampled_tokens(recipe: Recipe, steps: int) -> int:
    """About how many tokens the policy samples, replies taken as half as long as they may be."""
    replies = steps * recipe.train.prompts_per_step * recipe.train.group_size
    spoken = replies * recipe.episode.max_turns + count_talks(recipe, steps) * recipe.futures.rounds
    return spoken * (reply_limit(recipe) // 2)


def reply_limit(recipe: Recipe) -> int:
    """The most tokens that a turn of the policy may have; a model that is not on this machine sets no limit."""
    with suppress(UserError):
        return min(recipe.episode.max_tokens, find_context(recipe.model) or recipe.episode.max_tokens)
    return recipe.episode.max_tokens


def count_talks(recipe: Recipe, steps: int) -> int:
    """How many conversations are scored."""
    replies = steps * recipe.train.prompts_per_step * recipe.train.group_size
    return replies * (recipe.futures.leaves if recipe.futures.rounds else 1)


def estimate_time(recipe: Recipe, steps: int, tokens_per_s: float | None = None) -> str:
    """A line for the dry run: time a step and in all, and what that is based on."""
    if tokens_per_s is not None and recipe.train.samples:
        seconds = sampled_tokens(recipe, 1) / tokens_per_s
        basis = f"at the stated {tokens_per_s:g} sampled tokens/s, without learning, users and judges"
        return f"time       at least {duration(seconds)} a step, {duration(seconds * steps)} in all, {basis}"
    earlier = _find_earlier(recipe)
    if earlier is None:
        return (
            "time       not estimated: no earlier run of this model and method on this machine; take two steps "
            "(train.steps=2) and look again, or state a rate (--tokens-per-second; docs/performance.md has some)"
        )
    run, taken = earlier
    seconds, scale = statistics.median(taken), _size(recipe) / _size(run.recipe)
    scaled = "" if scale == 1 else f", times {scale:.3g} for the size of a step"
    basis = f"{run.path} took {duration(seconds)} a step (median of {len(taken)}{scaled})"
    return f"time       about {duration(seconds * scale)} a step, {duration(seconds * scale * steps)} in all: {basis}"


def _size(recipe: Recipe) -> float:
    return sampled_tokens(recipe, 1) if recipe.train.samples else recipe.train.prompts_per_step


def _find_earlier(recipe: Recipe) -> tuple[RunFolder, list[float]] | None:
    """The newest comparable run, and the seconds of its steps; the first, in which kernels compile, is left out."""
    for run in list(reversed(find_shown(place_of(recipe).parent, 1)))[:RUNS_READ]:
        with suppress(Exception):  # a folder of another version, or one that is just being written
            taken = [line["time/step"] for line in run.lines(recipe.train.method) if "time/step" in line][1:]
            same_machine = run.read_object(VERSIONS).get("platform") == platform.platform()
            if taken and same_machine and _compared(recipe) == _compared(run.recipe):
                return run, taken
    return None


def _compared(recipe: Recipe) -> tuple[object, ...]:
    """What is the same in runs whose steps take equally long, but for their size."""
    model = recipe.model
    return model.path, model.tiny, model.device, model.engine, recipe.train.method
