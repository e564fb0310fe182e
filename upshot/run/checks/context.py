"""What the checks look at, loaded once and only when one of them asks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.models.local import local_path
from upshot.models.rendering import Renderer, policy_renderer
from upshot.rollout.prompt_length import PromptLengthFilter, build_prompt_filter
from upshot.tasks.base import Task, tasks

HUB_SECONDS = 5.0
SMALL_FILES = ("config.json", "adapter_config.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has to say."""

    says: str
    fatal: bool = True
    """Whether the run cannot begin like this; else it is only worth knowing."""


@dataclass
class CheckContext:
    """A recipe with its task, rows and tokenizer."""

    recipe: Recipe
    offline: bool = False
    """Whether no endpoint is called."""
    resumed: bool = False
    """Whether the run's folder is there already."""
    ranks: int = 1
    """How many processes train together."""

    @property
    def sampled(self) -> bool:
        """Whether the method learns from replies of its own."""
        return self.recipe.train.samples

    @cached_property
    def task(self) -> Task:
        """The task; most checks ask for its rows, which take a while to make or to read."""
        task = tasks.create(self.recipe.task.name, self.recipe.task.options, "task")
        vars(task).update(rows=cache(task.rows), dialogues=cache(task.dialogues))
        return task

    @cached_property
    def model_here(self) -> bool:
        """Whether the model's small files can be read: it is new, in a folder, in the hub's cache, or at the hub."""
        return not (path := self.recipe.model.path) or is_here(path, "model.path", self.offline)

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        from upshot.training.setup import find_tokenizer

        return find_tokenizer(self.recipe.model, self.task)

    @cached_property
    def renderer(self) -> Renderer:
        """The policy's renderer."""
        return policy_renderer(self.tokenizer, self.recipe)

    @cached_property
    def prompt_filter(self) -> PromptLengthFilter:
        """How much the policy can take in."""
        from upshot.training.setup import find_context

        return build_prompt_filter(self.recipe, self.task, self.renderer, find_context(self.recipe.model))


def is_here(name: str, what: str, offline: bool) -> bool:
    """Whether a model's small files can be read; False: it is a name on the hub, which is not asked when `offline`.

    `what` says whose name it is, for the error where the hub cannot be reached.
    """
    path = local_path(name)
    if Path(path).is_dir():
        return True
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if any(isinstance(try_to_load_from_cache(path, file), str) for file in SMALL_FILES):
            return True
    except HFValidationError:
        raise UserError(f"{what} '{path}' is neither a folder here nor a possible name on the hub") from None
    if offline:
        return False
    host = urlsplit(constants.ENDPOINT)
    try:  # the hub's own client would try for minutes
        socket.create_connection((host.hostname or "", host.port or 443), HUB_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"{what} '{path}' is not a folder here, and {host.hostname} cannot be reached ({error}); name a folder"
        ) from error
    return True


Check = Callable[[CheckContext], Iterable[Finding]]
"""Says what it found; a `UserError` that it lets pass is a finding, too."""
