"""What the checks look at, loaded once and only when one of them asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from upshot.chat import Row
from upshot.models.rendering import Renderer
from upshot.recipe import Recipe
from upshot.rollout.room import Room
from upshot.tasks.base import Task, tasks
from upshot.train.plan import SAMPLED
from upshot.train.setup import find_context, load_tokenizer


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has to say."""

    says: str
    fatal: bool = True
    """Whether the run cannot begin like this; else it is only worth knowing."""


class Bench:
    """A recipe with its task, rows and tokenizer."""

    def __init__(self, recipe: Recipe, offline: bool = False, resumed: bool = False) -> None:
        self.recipe = recipe
        self.offline = offline
        """Whether no endpoint is called."""
        self.resumed = resumed
        """Whether the run's folder is there already."""

    @property
    def sampled(self) -> bool:
        """Whether the method learns from replies of its own."""
        return self.recipe.train.method in SAMPLED

    @cached_property
    def task(self) -> Task:
        """The task."""
        return tasks.create(self.recipe.task.name, self.recipe.task.options, "task")

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return load_tokenizer(self.recipe.model, self.task)

    @cached_property
    def renderer(self) -> Renderer:
        """The policy's renderer."""
        return Renderer(self.tokenizer, self.recipe.model.template_options)

    @cached_property
    def room(self) -> Room:
        """How much the policy can take in."""
        return room_of(self.recipe, self.task, self.renderer, find_context(self.recipe.model))

    def rows(self, split: str) -> Sequence[Row]:
        """The rows of a split."""
        return self.task.rows(split)


Check = Callable[[Bench], Iterable[Finding]]
"""Says what it found; a `UserError` that it lets pass is a finding, too."""


def room_of(recipe: Recipe, task: Task, renderer: Renderer, context: int) -> Room:
    """The room of a recipe's policy."""
    episode = recipe.episode
    return Room(renderer, context, episode.max_tokens, episode.system, task.tools())
