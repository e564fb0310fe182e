"""Ratings by a judge model and a rubric: accuracy, helpfulness, interactivity, or by a rubric of your own.

Temperature 0, structured output, range checked. A rating that is malformed or out of range is asked for again, then
missing with its reason; it never becomes a number nobody gave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from upshot.config.bounds import Count, Whole, Words
from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.models.base import Model, ModelCallError
from upshot.rewards.metric import Metric, metrics
from upshot.tasks.participants.ask import Flaw, ask, object_schema
from upshot.tasks.participants.templates import as_lines, as_text, render, task_of, template_source


@dataclass(eq=False)
class JudgeRating(Metric):
    """What a judge says under `key` by the rubric; missing when it says nothing usable.

    The rubric is a Jinja template that may use task, goal, reference and conversation, and asks for a JSON object with
    the keys "thought" and `key`.
    """

    rubric: str
    """Name of a rubric that comes with the project, or a file."""
    judge: Model | None = None
    max_tokens: Count = 2048
    repairs: Whole = 2
    """How often an answer that cannot be used is asked for again."""
    show_goal: bool = True
    """Whether the judge is shown the hidden goal."""
    key = "score"
    low, high = 0.0, 1.0
    """Bounds of the rating."""
    whole = False
    """Whether only whole numbers are ratings."""

    def __post_init__(self) -> None:
        if self.judge is None:
            raise UserError(f"the metric with the rubric '{self.rubric}' needs a judge; set models.judge (--judge)")
        if not self.low < self.high:
            raise UserError(
                f"the rubric '{self.rubric}' has the range {self.low:g} to {self.high:g}; low must be below high"
            )
        template_source(self.rubric)
        self.sampling = Sampling(max_tokens=self.max_tokens, temperature=0.0)
        kind: dict[str, Any] = {"type": "number", "minimum": self.low, "maximum": self.high}
        if self.whole:
            kind = {"type": "integer", "enum": list(range(int(self.low), int(self.high) + 1))}
        self.schema = object_schema({"thought": {"type": "string"}, self.key: kind})

    async def score(self, conversation: Conversation) -> Score:
        """The judge's rating of a finished conversation, its last word included; or missing with the reason."""
        flaws: list[str] = []
        prompt, judge = self.prompt(conversation), self.judge
        assert judge is not None  # refused above
        try:
            answer = await ask(judge, prompt, self.schema, self._flaw, self.sampling, "judge", self.repairs, flaws)
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
        # A bool is an int in Python, but "true" is not a rating.
        number = isinstance(rating, int | float) and not isinstance(rating, bool) and math.isfinite(rating)
        if not number or (self.whole and rating != int(rating)):
            return Flaw("not_a_number", f'"{self.key}" must be {wanted}, not {rating!r}')
        if not self.low <= rating <= self.high:
            return Flaw("out_of_range", f'"{self.key}" must be {wanted}, not {rating!r}')
        return None


@metrics.register("judged")
@dataclass(eq=False)
class JudgedMetric(JudgeRating):
    """A judge's rating by your own rubric."""

    key: Words = "score"
    low: float = 0.0
    high: float = 1.0
    """A rating out of bounds is asked for again; `whole`: so is one that is not a whole number."""
    whole: bool = False


@metrics.register("accuracy")
@dataclass(eq=False)
class Accuracy(JudgeRating):
    """1 when the assistant's last answer agrees with the row's reference, else 0."""

    rubric: str = "accuracy"
    key, whole = "accuracy", True

    async def score(self, conversation: Conversation) -> Score:
        """The verdict; missing without a reference to compare with."""
        if conversation.row.reference is None:
            return Score.missing(Reason.BAD_ROW, "accuracy: no reference")
        return await super().score(conversation)


@metrics.register("helpfulness")
@dataclass(eq=False)
class Helpfulness(JudgeRating):
    """How much the replies help with the request, from 0 to 1; with `futures.rounds: 0`, only the reply.

    It is the reward that multiturn-aware ones are compared with.
    """

    rubric: str = "helpfulness"
    show_goal: bool = False
    key, intrinsic = "helpfulness", True


@metrics.register("interactivity")
@dataclass(eq=False)
class Interactivity(JudgeRating):
    """Understanding, clarification and suggestions, rated by a judge that knows no more than the assistant did.

    `scale: unit` rates from 0 to 1. `scale: paper` is that of CollabLLM's tables: a rating S from 1 to 3, shown as
    2 (S − 2.5), which is 1 at best and −3 at worst. `show_goal: true` tells the judge what the person wanted.
    """

    rubric: str = ""
    show_goal: bool = False
    scale: Literal["unit", "paper"] = "unit"
    key, intrinsic = "interactivity", True

    def __post_init__(self) -> None:
        self.low, self.high = (0.0, 1.0) if self.scale == "unit" else (1.0, 3.0)
        self.rubric = self.rubric or ("interactivity" if self.scale == "unit" else "interactivity_paper")
        super().__post_init__()

    async def score(self, conversation: Conversation) -> Score:
        """The judge's rating on the metric's scale, or missing with the reason."""
        rated = await super().score(conversation)
        if self.scale == "unit" or rated.value is None:
            return rated
        return replace(rated, value=2 * (rated.value - 2.5))
