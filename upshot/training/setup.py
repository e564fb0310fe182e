"""From a recipe to the model that learns: weights, tokenizer, adapters. Everybody else: `rollout/services.py`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from upshot.config.recipe import PolicyConfig, Recipe
from upshot.config.sampling import Sampling
from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError
from upshot.core.files import read_text
from upshot.models.local import (
    adapter_config,
    find_config,
    load_local,
    load_tokenizer,
    load_whole,
    own_tokenizer,
    pick_device,
    pick_dtype,
)
from upshot.models.rendering import set_end_token
from upshot.tasks.base import Task


def load_policy(config: PolicyConfig, task: Task, seed: int, path: str = "", adapter: str = "") -> tuple[Any, Any]:
    """The policy's module and tokenizer: from a folder or name, or a new tiny one for the task's language.

    The tokenizer is that of `adapter` where one was saved with it; the adapter itself is not loaded.
    """
    path = path or config.path
    device = pick_device(config.device)
    if path:
        if config.quantize == "4bit":
            module, tokenizer = load_local(path, config.dtype, device, four_bits=True)
        else:
            module, tokenizer = load_whole(path, config.dtype, device)
        tokenizer = (own_tokenizer(adapter) if adapter else None) or tokenizer
    elif config.quantize != "none":
        raise UserError("model.quantize=4bit applies only to a model that is loaded; leave it out for a new tiny one")
    else:
        from upshot.models.tiny import tiny_model

        tokenizer = _new_tokenizer(task)
        module = tiny_model(config.tiny, tokenizer, seed).to(device)
        for weight in module.parameters():  # buffers stay float32, as in a model that is loaded: a resumed run loads it
            weight.data = weight.data.to(pick_dtype(config.dtype, device))
    return module, _set_template(tokenizer, config)


def find_tokenizer(config: PolicyConfig, task: Task) -> Any:
    """The policy's tokenizer alone, in a second or two."""
    if not config.path:
        return _set_template(_new_tokenizer(task), config)
    adapter = adapter_config(config.path)
    saved = own_tokenizer(config.path) if adapter is not None else None
    base = config.path if adapter is None else str(adapter["base_model_name_or_path"])
    return _set_template(saved or load_tokenizer(base), config)


def find_context(config: PolicyConfig) -> int:
    """The context limit of a policy that is not loaded, as `context_limit` will find it."""
    if config.max_context or not config.path:
        return config.max_context or config.tiny.context
    return context_limit(config, SimpleNamespace(config=find_config(config.path)))


def _new_tokenizer(task: Task) -> Any:
    from upshot.models.tiny import tiny_tokenizer

    words = task.vocabulary()
    if not words:
        raise UserError(f"task '{task.name}' needs a model that knows the language; set model.path=FOLDER")
    return tiny_tokenizer(words)


def _set_template(tokenizer: Any, config: PolicyConfig) -> Any:
    """The tokenizer with the chat template and end token that the recipe names, if any."""
    if config.chat_template:
        template, file = config.chat_template, Path(config.chat_template).expanduser()
        if "{" not in template:  # without it a template would show no message
            if not file.is_file():
                raise UserError(f"model.chat_template '{file}': no such file; give its path, or the template as text")
            template = read_text(file, "chat template")
        tokenizer.chat_template = template
    if config.end_token:
        set_end_token(tokenizer, config.end_token)
    return tokenizer


def seed_torch(seed: int) -> None:
    """What draws from torch's own stream (new adapters, dropout) follows the run's seed."""
    import torch

    torch.manual_seed(derive_seed(seed, "torch"))


def context_limit(config: PolicyConfig, module: Any) -> int:
    """Most tokens of prompt and reply together."""
    return config.max_context or int(getattr(module.config.get_text_config(), "max_position_embeddings", 0) or 0)


def sampling_of(recipe: Recipe) -> Sampling:
    """How the policy samples while training."""
    episode = recipe.episode
    return Sampling(episode.max_tokens, episode.temperature, episode.top_p, episode.top_k)
