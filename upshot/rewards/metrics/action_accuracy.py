"""Whether the assistant did the right thing with a question: ask back when it is ambiguous, answer when it is not."""

from __future__ import annotations

from typing import Literal

from upshot.config.bounds import Count, Whole
from upshot.core.conversation import Conversation
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.models.base import Model
from upshot.rewards.metric import Metric, metrics
from upshot.rewards.metrics.judged import JudgedMetric


@metrics.register("action_accuracy")
class ActionAccuracy(Metric):
    """1 when the reply asks back and the row's `meta['ambiguous']` is true, or answers and it is false; else 0."""

    def __init__(
        self,
        judge: Model | None = None,
        by: Literal["judge", "rule"] = "judge",
        max_tokens: Count = 512,
        repairs: Whole = 2,
    ) -> None:
        """Make the metric; `by`: a judge says whether the reply asks, or the rule that its last line is a question."""
        if by == "judge" and judge is None:
            raise UserError("the metric 'action_accuracy' needs a judge; set models.judge (--judge), or by: rule")
        self.asks = JudgedMetric("asks", judge, max_tokens, repairs, key="asks", whole=True) if by == "judge" else None

    async def score(self, conversation: Conversation) -> Score:
        """Right or wrong; missing when the row does not say whether it is ambiguous, or the reply is empty."""
        ambiguous = conversation.row.meta.get("ambiguous")
        if not isinstance(ambiguous, bool):
            return Score.missing(Reason.BAD_ROW, "action_accuracy: the row does not say whether it is ambiguous")
        last = conversation.last("assistant")
        if last is None or not last.content.strip():
            return Score.missing(Reason.NOTHING_SAID)
        if self.asks is None:
            last_line = last.content.strip().splitlines()[-1]
            asks = Score(float(last_line.rstrip("*_\"')”’ ").endswith("?")))
        else:
            asks = await self.asks.score(conversation)
        if asks.value is None:
            return asks
        right = (asks.value == 1.0) == ambiguous
        return Score(float(right), detail={**asks.detail, "asks": asks.value == 1.0, "ambiguous": ambiguous})
