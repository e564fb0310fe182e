"""A rating by a judge model and a rubric: one that comes with the project, or your own.

Temperature 0, structured output, range checked. A rating that is malformed or out of range is asked for again, then
missing with its reason; it never becomes a number nobody gave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from upshot.config.bounds import Count, Whole, Words
from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.models.base import Model, ModelCallError
from upshot.rewards.metric import Metric, metrics
from upshot.tasks.participants.ask import Flaw, ask, object_schema
from upshot.tasks.participants.templates import as_lines, as_text, render, task_of, template_source


@metrics.register("judged")
class JudgedMetric(Metric):
    """What a judge says under `key` by the rubric file; missing when it says nothing usable.

    The rubric is a Jinja template that may use task, goal, reference and conversation, and asks for a JSON object with
    the keys "thought" and `key`. `low`, `high`: anything else is asked for again; `whole`: so is what is no whole
    number. `show_goal`: whether the judge is told the hidden goal.
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
        self.judge, self.rubric, self.key = judge, rubric, key
        self.low, self.high, self.whole = low, high, whole
        self.sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        self.repairs = repairs
        self.show_goal = show_goal
        kind: dict[str, Any] = {"type": "number", "minimum": low, "maximum": high}
        if whole:
            kind = {"type": "integer", "enum": list(range(int(low), int(high) + 1))}
        self.schema = object_schema({"thought": {"type": "string"}, key: kind})

    async def score(self, conversation: Conversation) -> Score:
        """The judge's rating of a finished conversation, its last word included; or missing with the reason."""
        flaws: list[str] = []
        prompt = self.prompt(conversation)
        try:
            answer = await ask(self.judge, prompt, self.schema, self._flaw, self.sampling, "judge", self.repairs, flaws)
        except ModelCallError as error:
            return Score.failed(error, f"{self.key}: judge", flaws=list(flaws))
        detail: dict[str, Any] = {"thought": as_text(answer.values.get("thought"))}
        if answer.flaws:
            detail["flaws"] = list(answer.flaws)
        return Score(float(answer.values[self.key]), detail=detail)

    def prompt(self, conversation: Conversation) -> str:
        """What the judge is shown of a conversation."""
        return render(
            self.rubric,
            task=task_of(conversation, ""),
            goal=as_text(conversation.row.goal) if self.show_goal else "",
            reference=as_text(conversation.row.reference),
            conversation=as_lines(conversation.messages),
        )

    def _flaw(self, values: Mapping[str, Any]) -> Flaw | None:
        if self.key not in values:
            return Flaw("missing_key", f'the key "{self.key}" is missing')
        rating = values[self.key]
        wanted = f"{'a whole' if self.whole else 'a'} number from {self.low:g} to {self.high:g}"
        # A bool is an int in Python, but "true" is no rating.
        number = isinstance(rating, int | float) and not isinstance(rating, bool) and math.isfinite(rating)
        if not number or (self.whole and rating != int(rating)):
            return Flaw("not_a_number", f'"{self.key}" must be {wanted}, not {rating!r}')
        if not self.low <= rating <= self.high:
            return Flaw("out_of_range", f'"{self.key}" must be {wanted}, not {rating!r}')
        return None
