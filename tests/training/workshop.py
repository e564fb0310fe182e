"""A tiny learner, data for it, and a recipe that trains in a second."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_parts
from upshot.config.load import validate_recipe
from upshot.config.recipe import Recipe, TrainConfig
from upshot.config.recipe.train import OptimizerConfig
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.phase import Lesson, learn

TINY: dict[str, Any] = {"tiny": {"hidden": 16, "layers": 1, "heads": 1, "mlp": 32}, "dtype": "float32"}
"""A model that GPU kernels accept (heads of 16 or more), in float32 there as well: bounds are the same everywhere."""


def learner(seed: int = 0, value_head: bool = False, **config: Any) -> Learner:
    """A learner on a new model of a few thousand weights."""
    module, tokenizer, _, _ = tiny_parts(seed)
    settings = TrainConfig.model_validate(config)
    return Learner(module, tokenizer, settings, max_tokens=8, value_head=value_head)


def datum(length: int, seed: int, prompt: int = 3, vocabulary: int = 50) -> Datum:
    """A sequence of random ids with everything that an objective may need."""
    rng = random.Random(seed)
    ids = [rng.randrange(7, vocabulary) for _ in range(length)]
    mask = [0] * prompt + [1] * (length - prompt)
    noise = [[rng.gauss(0, 1) for _ in range(length)] for _ in range(4)]
    old = [-4 + 0.1 * x for x in noise[0]]
    return Datum(
        ids, mask, old, noise[1], [x - 0.1 * y for x, y in zip(old, noise[2], strict=True)], noise[3], noise[2]
    )


def adam_config(weight_decay: float, small: bool = False, offload: bool = False) -> OptimizerConfig:
    """Settings of an optimizer with a shorter memory of the second moment than by default; `small`: with 8-bit
    moments."""
    name = "adamw-8bit" if small else "adamw"
    return OptimizerConfig(name=name, weight_decay=weight_decay, betas=(0.9, 0.99), offload=offload)  # type: ignore[arg-type]


def recipe(folder: Path, **train: Any) -> Recipe:
    """A miniature quickstart: warm start and a method, on a tiny model."""
    warm = train.pop("warm", True)
    more = train.pop("more", {})
    base: dict[str, Any] = {
        "name": "thimble",
        "run_dir": str(folder),
        "model": TINY,
        "task": {"name": "slots", "rows_per_split": 64},
        "episode": {"max_tokens": 6},
        "futures": {"samples": 2, "rounds": 1},
        "reward": {"metrics": [{"name": "verifier"}, {"name": "token_amount", "weight": -0.01}]},
        "warm_start": {"steps": 4, "batch": 8} if warm else None,
        "train": {
            "method": "rl",
            "steps": 6,
            "prompts_per_step": 3,
            "group_size": 4,
            "lr": 1e-3,
            "save": {"every": 2, **train.pop("save", {})},
            **train,
        },
    }
    return validate_recipe({**base, **more})


def recipe_on_cpu(folder: Path, **train: Any) -> Recipe:
    """The same, always on the CPU: for ranks, which do not have a GPU each."""
    more = train.pop("more", {})
    return recipe(folder, **train, more={**more, "model": {**TINY, **more.get("model", {}), "device": "cpu"}})


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "time" not in key} for line in lines]


def update(own: Learner, lesson: Lesson, seed: int = 0) -> dict[str, float]:
    """Learn from a prepared lesson."""
    return learn(own, (), seed, lambda *_: lesson)


def assert_same_steps(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """The same lines, bit for bit on the CPU.

    On a GPU, batches depend on timing, and products of different numbers of rows round differently.
    """
    if not torch.cuda.is_available():
        assert found == wanted
        return
    for line, other in zip(found, wanted, strict=True):
        texts = {key: text for key, text in other.items() if isinstance(text, str)}
        assert {key: line[key] for key in texts} == texts
        assert {**line, **dict.fromkeys(texts, 0)} == pytest.approx({**other, **dict.fromkeys(texts, 0)}, 1e-3, 1e-5)
