"""The loss on examples that are not trained: of demonstrations and of pairs. Nothing is learned, no dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from upshot.core.errors import UserError
from upshot.tasks.datasets.records import Preference, read_dialogues, read_preferences
from upshot.training.learner.batch import Datum
from upshot.training.learner.learner import Learner
from upshot.training.loops.base import LoopRun
from upshot.training.objectives import losses

if TYPE_CHECKING:
    from upshot.config.recipe import Recipe
    from upshot.core.conversation import Message
    from upshot.tasks.base import Task


def held_out_dialogues(recipe: Recipe, task: Task) -> Sequence[tuple[Message, ...]]:
    """The dialogues that a recipe evaluates sft on."""
    config = recipe.eval
    found = read_dialogues(config.data, "eval.data") if config.data else task.dialogues(config.split)
    if not found:
        raise UserError(f"task '{task.name}' has no dialogues in its split '{config.split}'; set eval.data=FILE")
    return found[: config.rows]


def held_out_pairs(run: LoopRun) -> list[Preference]:
    """The pairs that a recipe evaluates dpo on."""
    config = run.recipe.eval
    assert config.data, "check_evaluations() comes first"
    return read_preferences(config.data, run.recipe.train.dpo.min_gap, "eval.data")[: config.rows]


def sft_loss(learner: Learner, data: Sequence[Datum]) -> dict[str, float]:
    """Mean negative log-likelihood of the assistant's tokens."""
    spoken = [datum for datum in data if any(datum.mask)]
    found = learner.logprobs(spoken)
    tokens = sum(sum(datum.mask) for datum in spoken)
    total = math.fsum(_sum(own, datum) for own, datum in zip(found, spoken, strict=True))
    return {"loss/nll": -total / max(tokens, 1)}


def dpo_loss(learner: Learner, pairs: Sequence[tuple[Datum, Datum]]) -> dict[str, float]:
    """Mean over pairs of the recipe's preference loss, the margin, and how often the better reply is ahead."""
    config, data = learner.config, [datum for pair in pairs for datum in pair]
    own, reference = learner.logprobs(data), learner.logprobs(data, reference=True)
    gained = [_sum(a, datum) - _sum(b, datum) for a, b, datum in zip(own, reference, data, strict=True)]
    if config.dpo.loss == "ipo":
        gained = [gain / max(sum(datum.mask), 1) for gain, datum in zip(gained, data, strict=True)]
    margin = torch.tensor(gained[::2]) - torch.tensor(gained[1::2])
    return {
        "loss/dpo": float(losses.preference(margin, config.dpo.beta, config.dpo.loss).mean()),
        "dpo/margin": float(config.dpo.beta * margin.mean()),
        "dpo/accuracy": float((margin > 0).float().mean()),
    }


def _sum(logprobs: Sequence[float], datum: Datum) -> float:
    return math.fsum(p for p, bit in zip(logprobs, datum.mask, strict=True) if bit)
