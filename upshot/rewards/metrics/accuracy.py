"""Right or wrong against the reference, by a judge."""

from __future__ import annotations

from upshot.config.bounds import Count, Whole
from upshot.core.conversation import Conversation
from upshot.core.score import Reason, Score
from upshot.models.base import Model
from upshot.rewards.metric import metrics
from upshot.rewards.metrics.judged import JudgedMetric


@metrics.register("accuracy")
class Accuracy(JudgedMetric):
    """1 when the assistant's last answer agrees with the row's reference, else 0."""

    def __init__(
        self, judge: Model | None = None, rubric: str = "accuracy", max_tokens: Count = 2048, repairs: Whole = 2
    ) -> None:
        super().__init__(rubric, judge, "accuracy", 0, 1, whole=True, max_tokens=max_tokens, repairs=repairs)

    async def score(self, conversation: Conversation) -> Score:
        """The verdict; missing without a reference to compare with."""
        if conversation.row.reference is None:
            return Score.missing(Reason.BAD_ROW, "accuracy: no reference")
        return await super().score(conversation)
