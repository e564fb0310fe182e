"""A metric looks at a finished conversation and returns a score, or missing with the reason.

A plain number is a score, too. Raising is fine: the scorer turns any exception of one conversation into a missing
score with the exception's text in its detail. The rest of the run goes on. `breakpoint()` works: everything runs in one
process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from upshot.chat import Conversation
from upshot.errors import UserError
from upshot.registry import Registry
from upshot.score import Score
from upshot.stopwatch import at_work
from upshot.time_limit import limited


class Metric(ABC):
    """Scores conversations. Constructor keyword arguments are its options in the recipe.

    A constructor may also name any of these, and gets them from the program: `task` (the `Task`), `judge`
    (a `Model`), `tokenizer` (of the policy), `models` (all helper models by name), `sandbox` (a `CodeRunner`).
    """

    intrinsic: bool = False
    """About how it was said (length, interactivity) rather than what was achieved; the log keeps both sums."""

    @abstractmethod
    async def score(self, conversation: Conversation) -> Score:
        """The score of one finished conversation, the last word included."""

    async def aclose(self) -> None:
        """Release what all conversations shared."""


async def score_by(metric: Metric, conversation: Conversation, name: str) -> Score:
    """A metric's score of one conversation: what it returns becomes a `Score`, what it raises is missing."""
    try:
        with at_work("judges"):
            return Score.of(await limited(metric, metric.score, conversation), f"metric '{name}'")
    except UserError:
        raise
    except Exception as error:
        return Score.failed(error, name)


metrics: Registry[Metric] = Registry("metric", "upshot.rewards.metrics")
"""Metrics that a recipe can name in `reward.metrics`."""
