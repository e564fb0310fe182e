"""From a recipe to the model that learns: weights, tokenizer, adapters. Everybody else: `rollout/company.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from upshot.chat import derive_seed
from upshot.errors import UserError
from upshot.models.base import Completion, Model, Request, Sampling
from upshot.models.local import (
    BorrowedModel,
    LocalModel,
    load_4bit,
    load_whole,
    local_path,
    own_tokenizer,
    pick_device,
    pick_dtype,
)
from upshot.recipe import PolicyConfig, Recipe
from upshot.rollout.company import of_recipe
from upshot.tasks.base import Task
from upshot.whole_files import read_text


def load_policy(config: PolicyConfig, task: Task, seed: int, path: str = "", adapter: str = "") -> tuple[Any, Any]:
    """The policy's module and tokenizer: from a folder or name, or a new tiny one for the task's language.

    The tokenizer is that of `adapter` where one was saved with it; the adapter itself is not loaded.
    """
    path = path or config.path
    device = pick_device(config.device)
    if path:
        from transformers.utils import logging

        logging.disable_progress_bar()  # the run has its own
        if config.quantize == "4bit":
            module, tokenizer = load_4bit(path, config.dtype, device)
        else:
            module, tokenizer = load_whole(path, config.dtype, device)
        tokenizer = (own_tokenizer(adapter) if adapter else None) or tokenizer
    elif config.quantize != "none":
        raise UserError("model.quantize=4bit is for a model that is loaded; a new tiny one needs no bits saved")
    else:
        from upshot.models.tiny import tiny_model, tiny_tokenizer

        words = task.vocabulary()
        if not words:
            raise UserError(f"task '{task.name}' speaks a real language; name a model with model.path=FOLDER")
        tokenizer = tiny_tokenizer(words)
        module = tiny_model(config.tiny, tokenizer, seed).to(device, pick_dtype(config.dtype, device))
    if config.chat_template:
        file = Path(config.chat_template)
        is_file = len(config.chat_template) < 256 and file.is_file()
        tokenizer.chat_template = read_text(file, "chat template") if is_file else config.chat_template
    return module, tokenizer


def seed_torch(seed: int) -> None:
    """What draws from torch's own stream (new adapters, dropout) follows the run's seed."""
    import torch

    torch.manual_seed(derive_seed(seed, "torch"))


def context_limit(config: PolicyConfig, module: Any) -> int:
    """Most tokens of prompt and reply together."""
    return config.max_context or int(getattr(module.config.get_text_config(), "max_position_embeddings", 0) or 0)


async def check_helpers(recipe: Recipe, task: Task, tokenizer: Any) -> None:
    """Refuse what would fail only after the warm start: helpers without key or endpoint, a user without model.

    Models in this process are not loaded, which takes long; only their folders are looked for.
    """
    company = of_recipe(recipe, task, _Unheard(), tokenizer)
    for model in dict.fromkeys(company.models.values()):
        if isinstance(model, LocalModel) and model.spec.model.startswith((".", "/", "~")):
            local_path(model.spec.model)
        if not isinstance(model, BorrowedModel):
            async with model:
                pass


class _Unheard(Model):
    """Stands in for the policy where nobody asks it."""

    name = "policy"

    def frozen(self, when: str) -> Model:
        """Nobody's copy."""
        return self

    async def generate(self, request: Request) -> list[Completion]:
        """Never called."""
        raise NotImplementedError


def sampling_of(recipe: Recipe) -> Sampling:
    """How the policy samples while training."""
    episode = recipe.episode
    return Sampling(episode.max_tokens, episode.temperature, episode.top_p, episode.top_k)
