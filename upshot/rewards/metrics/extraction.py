"""`artefact->metric`: find what the conversation produced, then score only that.

The inner metric sees a conversation whose last word is the artefact, so any metric, yours included, works behind the
arrow. An extraction that fails is missing, with the reason. A conversation that produced nothing is a result of the
policy's, not a failure to measure: the artefact is then empty, marked `absent` in the detail, and scored as that.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message
from upshot.core.errors import UserError, did_you_mean
from upshot.core.score import Score
from upshot.core.time_limit import limit_call
from upshot.models.base import Model, ModelCallError
from upshot.rewards.metric import Metric
from upshot.tasks.participants.ask import Flaw, ask, object_schema
from upshot.tasks.participants.templates import as_lines, as_text, render

DESCRIPTIONS = {
    "answer": "the final answer to the person's problem",
    "code": "the complete program or function, without code fences",
    "document": "the full text of the document",
}
"""How an artefact is described to the judge; any other is described by its name."""
WAYS = ("fence", "judge", "last")
TYPO = 0.85
"""How alike a name must be to one of those to be taken for a slip of the pen."""
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)")


class ExtractedMetric(Metric):
    """A metric of the artefact instead of the whole conversation."""

    def __init__(self, artefact: str, inner: Metric, how: str, judge: Model | None = None, where: str = "") -> None:
        """how: by `judge`, from the last code `fence`, or the `last` message itself."""
        check_extraction(artefact, how, where)
        if how == "judge" and judge is None:
            place = f" in {where}" if where else ""
            raise UserError(
                f"extracting a {artefact}{place} needs a judge; set models.judge, or extract: fence or extract: last"
            )
        self.artefact, self.inner = artefact, inner
        self.intrinsic = inner.intrinsic
        self._how, self._judge = how, judge

    async def score(self, conversation: Conversation) -> Score:
        """The inner metric's score of the artefact; missing when it could not be extracted."""
        artefact = await self._extract(conversation)
        if isinstance(artefact, Score):
            return artefact
        shown = Conversation(conversation.row, conversation.seed, conversation.key)
        shown.session, shown.score, shown.counts = dict(conversation.session), conversation.score, conversation.counts
        shown.say(Message("assistant", artefact))
        score = await limit_call(self.inner, self.inner.score, shown)
        score = Score.of(score, f"metric '{type(self.inner).__name__}'")
        absent = {} if artefact.strip() else {"absent": True}
        return Score(score.value, score.reason, {self.artefact: artefact, **score.detail, **absent})

    async def _extract(self, conversation: Conversation) -> str | Score:
        """The artefact's text, empty where there is none; or a missing score with the reason."""
        texts = [message.content for message in reversed(conversation.messages) if message.role == "assistant"]
        if self._how == "last":
            return texts[0] if texts else ""
        if self._how == "fence":
            return next((block for text in texts if (block := last_fence(text)) is not None), "")
        assert self._judge is not None  # refused above
        return await extract_artefact(self._judge, self.artefact, conversation)

    async def aclose(self) -> None:
        """Close the inner metric."""
        await self.inner.aclose()


async def extract_artefact(model: Model, artefact: str, conversation: Conversation) -> str | Score:
    """What a conversation produced, as a model writes it down at temperature 0: empty when there is nothing, missing
    when it fails."""
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
        answer = await ask(model, prompt, schema, flaw, Sampling(8192, 0.0), "judge")
    except ModelCallError as error:
        return Score.failed(error, f"{artefact}: extraction")
    return "" if answer.values.get("found") is False else str(answer.values[artefact])


def last_fence(text: str) -> str | None:
    """The content of the last fenced block of a text."""
    lines = text.split("\n")  # by lines: one pattern for all of this is quadratic in fences that are never closed
    fences = [(number, fence[1], fence[2]) for number, line in enumerate(lines) if (fence := _FENCE.fullmatch(line))]
    closed = {mark: number for number, mark, rest in fences if not rest.strip()}
    block, opened, start = None, "", 0
    for number, mark, rest in fences:
        if opened == mark and not rest.strip():
            block, opened = "\n".join(lines[start:number]).rstrip("\n"), ""
        elif not opened and closed.get(mark, -1) > number:
            opened, start = mark, number + 1
    return block


def check_extraction(artefact: str, how: str, where: str = "") -> None:
    """Raise when the artefact is misspelled or the way to find it unknown."""
    place = f" in {where}" if where else ""
    if artefact not in DESCRIPTIONS and difflib.get_close_matches(artefact, DESCRIPTIONS, 1, TYPO):
        raise UserError(f"unknown artefact '{artefact}'{place}; {did_you_mean(artefact, DESCRIPTIONS)}")
    if how not in WAYS:
        raise UserError(f"unknown way '{how}' to extract a {artefact}{place}; {did_you_mean(how, WAYS)}")
