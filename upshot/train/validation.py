"""The loss on examples that are not trained: of demonstrations and of pairs. Nothing is learned, no dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from upshot.errors import UserError
from upshot.train.batch import Datum
from upshot.train.examples import Preference, read_dialogues, read_preferences
from upshot.train.learner import Learner

if TYPE_CHECKING:
    from upshot.chat import Message
    from upshot.train.runner import Run


def held_out_dialogues(run: Run) -> Sequence[tuple[Message, ...]]:
    """The dialogues that a recipe evaluates sft on."""
    config = run.recipe.eval
    found = read_dialogues(config.data, "eval.data") if config.data else run.task.dialogues(config.split)
    if not found:
        raise UserError(f"task '{run.task.name}' has no dialogues in its split '{config.split}'; set eval.data=FILE")
    return found[: config.rows]


def held_out_pairs(run: Run) -> list[Preference]:
    """The pairs that a recipe evaluates dpo on."""
    config = run.recipe.eval
    assert config.data, "check_evaluations() comes first"
    return read_preferences(config.data, run.recipe.train.min_gap, "eval.data")[: config.rows]


def sft_loss(learner: Learner, data: Sequence[Datum]) -> dict[str, float]:
    """Mean negative log-likelihood of the assistant's tokens."""
    spoken = [datum for datum in data if any(datum.mask)]
    found = learner.logprobs(spoken)
    tokens = sum(sum(datum.mask) for datum in spoken)
    total = math.fsum(_sum(own, datum) for own, datum in zip(found, spoken, strict=True))
    return {"loss/nll": -total / max(tokens, 1)}


def dpo_loss(learner: Learner, pairs: Sequence[tuple[Datum, Datum]]) -> dict[str, float]:
    """Mean over pairs of −log σ(β × margin), the margin itself, and how often the better reply is ahead."""
    data = [datum for pair in pairs for datum in pair]
    own, reference = learner.logprobs(data), learner.logprobs(data, reference=True)
    gains = [_sum(a, datum) - _sum(b, datum) for a, b, datum in zip(own, reference, data, strict=True)]
    margins = [
        learner.config.beta * (chosen - rejected) for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)
    ]
    count = max(len(margins), 1)
    return {
        "loss/dpo": math.fsum(_softplus(-margin) for margin in margins) / count,
        "dpo/margin": math.fsum(margins) / count,
        "dpo/accuracy": sum(margin > 0 for margin in margins) / count,
    }


def _sum(logprobs: Sequence[float], datum: Datum) -> float:
    return math.fsum(p for p, bit in zip(logprobs, datum.mask, strict=True) if bit)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
