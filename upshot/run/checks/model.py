"""The model in training: folder, weights, tokenizer, chat template, device; nothing of it is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from upshot.models.local import NO_BITSANDBYTES, local_path, pick_device
from upshot.run.checks.context import CheckContext, Finding
from upshot.training.setup import find_context

WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def check(context: CheckContext) -> Iterator[Finding]:
    """Look for what loading would look for."""
    config = context.recipe.model
    if config.device not in ("auto", "cpu"):
        pick_device(config.device)
    if config.lora is not None and importlib.util.find_spec("peft") is None:
        yield Finding("model.lora needs peft: pip install -e '.[lora]'")
    if config.quantize == "4bit" and importlib.util.find_spec("bitsandbytes") is None:
        yield Finding(NO_BITSANDBYTES)
    if config.path:
        here = Path(local_path(config.path))
        if not context.model_here:
            yield Finding(f"model.path '{config.path}' is a name of the hub and was not looked up (--offline)", False)
            return
        if here.is_dir() and not any(file for kind in WEIGHTS for file in here.glob(kind)):
            yield Finding(f"model.path '{config.path}' has no weights ({', '.join(WEIGHTS)})")
    room = find_context(config.model_copy(update={"max_context": 0})) if config.max_context else 0
    if 0 < room < config.max_context:
        yield Finding(
            f"model.max_context is {config.max_context}, and the model has {room} positions"
            f"{' (model.tiny.context)' if not config.path else ''}; set it to {room} or less"
        )
    context.renderer.check()
