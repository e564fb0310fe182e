"""How helpful the assistant is to the user, by a judge: the reward that multiturn-aware ones are compared with."""

from __future__ import annotations

from upshot.config.bounds import Count, Whole
from upshot.models.base import Model
from upshot.rewards.metric import metrics
from upshot.rewards.metrics.judged import JudgedMetric


@metrics.register("helpfulness")
class Helpfulness(JudgedMetric):
    """How much the replies help with what was asked, from 0 to 1; with `futures.rounds: 0` of the reply alone."""

    intrinsic = True

    def __init__(
        self,
        judge: Model | None = None,
        rubric: str = "helpfulness",
        max_tokens: Count = 2048,
        repairs: Whole = 2,
        show_goal: bool = False,
    ) -> None:
        super().__init__(rubric, judge, "helpfulness", 0.0, 1.0, False, max_tokens, repairs, show_goal)
