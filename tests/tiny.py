"""A tiny policy for tests: the quickstart's language, a model of a few thousand weights."""

from __future__ import annotations

from functools import cache
from typing import Any

from upshot.config.recipe import TinyConfig
from upshot.config.sampling import Sampling
from upshot.engine.engine import Engine
from upshot.models.engine_model import EngineModel
from upshot.models.rendering import Renderer
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.rollout.episode import Policy
from upshot.tasks.slots import SlotsTask

SHAPE = TinyConfig(hidden=16, layers=2, heads=2, mlp=32)


def tiny_parts(seed: int = 0) -> tuple[Any, Any, Renderer, SlotsTask]:
    """Module, tokenizer, renderer and task."""
    task = SlotsTask(rows_per_split=64)
    tokenizer = tiny_tokenizer(task.vocabulary())
    return tiny_model(SHAPE, tokenizer, seed), tokenizer, Renderer(tokenizer), task


@cache
def shared_tokenizer() -> Any:
    """The quickstart's tokenizer, for learners on other models."""
    return tiny_tokenizer(SlotsTask(rows_per_split=64).vocabulary())


def tiny_policy(max_tokens: int = 6, temperature: float = 1.0) -> tuple[Policy, SlotsTask]:
    """A policy of random weights that says random words."""
    module, tokenizer, renderer, task = tiny_parts()
    model = EngineModel(Engine(module, renderer.end_ids), tokenizer, "policy", renderer)
    return Policy(model, renderer, Sampling(max_tokens, temperature), 256), task
