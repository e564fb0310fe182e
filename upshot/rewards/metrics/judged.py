"""A rating by a judge model and a rubric of your own."""

from __future__ import annotations

from upshot.config.bounds import Count, Whole, Words
from upshot.core.conversation import Conversation
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.models.base import Model
from upshot.rewards.metric import Metric, metrics
from upshot.tasks.participants.judge import Judge
from upshot.tasks.participants.templates import template_source


@metrics.register("judged")
class JudgedMetric(Metric):
    """What a judge says under `key` by the rubric file; missing when it says nothing usable.

    The rubric is a Jinja template that may use task, goal, reference and conversation, and asks for a JSON object with
    the keys "thought" and `key`.
    """

    def __init__(
        self,
        rubric: str,
        judge: Model | None = None,
        key: Words = "score",
        low: float = 0.0,
        high: float = 1.0,
        whole: bool = False,
        max_tokens: Count = 2048,
        repairs: Whole = 2,
        show_goal: bool = True,
    ) -> None:
        if judge is None:
            raise UserError(f"the metric with the rubric '{rubric}' needs a judge model; the recipe names none")
        if not low < high:
            raise UserError(f"the rubric '{rubric}' has the range {low:g} to {high:g}; low must be below high")
        template_source(rubric)
        self.judge = Judge(judge, rubric, key, low, high, whole, max_tokens, repairs, show_goal)

    async def score(self, conversation: Conversation) -> Score:
        """The judge's rating."""
        return await self.judge.rate(conversation)
