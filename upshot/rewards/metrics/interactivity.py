"""How well the assistant works together with the user, by a judge."""

from __future__ import annotations

from upshot.config.bounds import Count, Whole
from upshot.models.base import Model
from upshot.rewards.metric import metrics
from upshot.rewards.metrics.judged import JudgedMetric


@metrics.register("interactivity")
class Interactivity(JudgedMetric):
    """Understanding, clarification and suggestions, from 0 to 1, by a judge who knows no more than the assistant did.

    `show_goal: true` tells the judge what the person wanted.
    """

    intrinsic = True

    def __init__(
        self,
        judge: Model | None = None,
        rubric: str = "interactivity",
        max_tokens: Count = 2048,
        repairs: Whole = 2,
        show_goal: bool = False,
    ) -> None:
        super().__init__(rubric, judge, "interactivity", 0.0, 1.0, False, max_tokens, repairs, show_goal)
