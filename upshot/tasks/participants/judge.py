"""A judge reads a finished conversation and rates it by a rubric, or writes down what it produced.

Temperature 0, structured output, range checked. A rating that is malformed or out of range is asked for again, then
missing with its reason; it never becomes a number nobody gave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation
from upshot.core.score import Score
from upshot.models.base import Model, ModelCallError
from upshot.tasks.participants.ask import Flaw, ask, object_schema
from upshot.tasks.participants.templates import as_lines, as_text, render, task_of

DESCRIPTIONS = {
    "answer": "the final answer to the person's problem",
    "code": "the complete program or function, without code fences",
    "document": "the full text of the document",
}


class Judge:
    """One rubric, one model, one range."""

    def __init__(
        self,
        model: Model,
        rubric: str,
        key: str = "score",
        low: float = 0.0,
        high: float = 1.0,
        whole: bool = False,
        max_tokens: int = 2048,
        repairs: int = 2,
        show_goal: bool = True,
    ) -> None:
        """Make the judge.

        rubric: name or path (.j2) of the template; it may use task, goal, reference and conversation.
        key: the JSON key the rating comes under.
        low, high: the range of the rating; anything else is asked for again.
        whole: whether only whole numbers are ratings.
        show_goal: whether the judge is told the hidden goal.
        """
        self.model = model
        self.rubric = rubric
        self.key = key
        self.low = low
        self.high = high
        self.whole = whole
        self.sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        self.repairs = repairs
        self.show_goal = show_goal
        kind: dict[str, Any] = {"type": "number", "minimum": low, "maximum": high}
        if whole:
            kind = {"type": "integer", "enum": list(range(int(low), int(high) + 1))}
        self.schema = object_schema({"thought": {"type": "string"}, key: kind})

    async def rate(self, conversation: Conversation) -> Score:
        """The rating of a finished conversation, its last word included; or missing with the reason."""
        flaws: list[str] = []
        prompt = judge_prompt(self.rubric, conversation, self.show_goal)
        try:
            answer = await ask(self.model, prompt, self.schema, self._flaw, self.sampling, "judge", self.repairs, flaws)
        except ModelCallError as error:
            return Score.failed(error, f"{self.key}: judge", flaws=list(flaws))
        detail: dict[str, Any] = {"thought": as_text(answer.values.get("thought"))}
        if answer.flaws:
            detail["flaws"] = list(answer.flaws)
        return Score(float(answer.values[self.key]), detail=detail)

    def _flaw(self, values: Mapping[str, Any]) -> Flaw | None:
        if self.key not in values:
            return Flaw("missing_key", f'the key "{self.key}" is missing')
        rating = values[self.key]
        wanted = f"{'a whole' if self.whole else 'a'} number from {self.low:g} to {self.high:g}"
        # A bool is an int in Python, but "true" is no rating.
        if isinstance(rating, bool) or not isinstance(rating, int | float) or not math.isfinite(rating):
            return Flaw("not_a_number", f'"{self.key}" must be {wanted}, not {rating!r}')
        if self.whole and rating != int(rating):
            return Flaw("not_a_number", f'"{self.key}" must be {wanted}, not {rating!r}')
        if not self.low <= rating <= self.high:
            return Flaw("out_of_range", f'"{self.key}" must be {wanted}, not {rating!r}')
        return None


def judge_prompt(rubric: str, conversation: Conversation, show_goal: bool = True) -> str:
    """What a judge is shown of a conversation."""
    return render(
        rubric,
        task=task_of(conversation, ""),
        goal=as_text(conversation.row.goal) if show_goal else "",
        reference=as_text(conversation.row.reference),
        conversation=as_lines(conversation.messages),
    )


async def extract_artefact(model: Model, artefact: str, conversation: Conversation, repairs: int = 2) -> str | Score:
    """What a conversation produced, as a model writes it down: empty when there is nothing, missing when it fails."""
    schema = object_schema({"found": {"type": "boolean"}, artefact: {"type": "string"}})
    prompt = render(
        "extract",
        artefact=artefact,
        description=DESCRIPTIONS.get(artefact, f"the {artefact}"),
        goal=as_text(conversation.row.goal),
        requirement=as_text(conversation.row.meta.get("extraction_requirement")),
        conversation=as_lines(conversation.messages),
    )

    def flaw(values: Mapping[str, Any]) -> Flaw | None:
        if values.get("found") is False:
            return None
        text = values.get(artefact)
        if not isinstance(text, str):
            return Flaw("missing_key", f'"{artefact}" must be text')
        return None if text.strip() else Flaw("empty", f'"{artefact}" is empty although it was found')

    try:
        answer = await ask(model, prompt, schema, flaw, Sampling(8192, 0.0), "judge", repairs)
    except ModelCallError as error:
        return Score.failed(error, f"{artefact}: extraction")
    return "" if answer.values.get("found") is False else str(answer.values[artefact])
