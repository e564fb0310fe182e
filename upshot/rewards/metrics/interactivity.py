"""How well the assistant works together with the user, by a judge."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from upshot.config.bounds import Count, Whole
from upshot.core.conversation import Conversation
from upshot.core.score import Score
from upshot.models.base import Model
from upshot.rewards.metric import metrics
from upshot.rewards.metrics.judged import JudgedMetric


@metrics.register("interactivity")
class Interactivity(JudgedMetric):
    """Understanding, clarification and suggestions, by a judge who knows no more than the assistant did.

    `scale: unit` rates from 0 to 1. `scale: paper` is that of CollabLLM's tables: a rating S from 1 to 3, shown as
    2 (S − 2.5), which is 1 at best and −3 at worst. `show_goal: true` tells the judge what the person wanted.
    """

    intrinsic = True

    def __init__(
        self,
        judge: Model | None = None,
        rubric: str = "",
        max_tokens: Count = 2048,
        repairs: Whole = 2,
        show_goal: bool = False,
        scale: Literal["unit", "paper"] = "unit",
    ) -> None:
        self.scale = scale
        low, high = (0.0, 1.0) if scale == "unit" else (1.0, 3.0)
        rubric = rubric or ("interactivity" if scale == "unit" else "interactivity_paper")
        super().__init__(rubric, judge, "interactivity", low, high, False, max_tokens, repairs, show_goal)

    async def score(self, conversation: Conversation) -> Score:
        """The judge's rating on the metric's scale, or missing with the reason."""
        rated = await super().score(conversation)
        if self.scale == "unit" or rated.value is None:
            return rated
        return replace(rated, value=2 * (rated.value - 2.5))
