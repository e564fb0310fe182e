"""`artefact->metric`: find what the conversation produced, then score only that.

The inner metric sees a conversation whose last word is the artefact, so any metric, yours included, works behind the
arrow. An extraction that fails is missing, with the reason. A conversation that produced nothing is a result of the
policy's, not a failure to measure: the artefact is then empty, marked `absent` in the detail, and scored as that.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Awaitable, Callable, Mapping

from upshot.core.conversation import Conversation, Message
from upshot.core.errors import UserError, did_you_mean
from upshot.core.score import Score
from upshot.core.time_limit import limited
from upshot.models.base import Model
from upshot.rewards.metric import Metric

ARTEFACTS = ("answer", "code", "document")
"""Artefacts that the judge is told more about; any other is asked for by the words that name it."""
TYPO = 0.85
"""How alike a name must be to one of those to be taken for a slip of the pen."""
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)")


async def last_message(conversation: Conversation, artefact: str, judge: Model | None) -> str | Score:
    """The assistant's last message as it stands."""
    last = conversation.last("assistant")
    return last.content if last is not None else ""


async def last_block(conversation: Conversation, artefact: str, judge: Model | None) -> str | Score:
    """The text inside the last code fence that any assistant message holds."""
    said = (message.content for message in reversed(conversation.messages) if message.role == "assistant")
    return next((block for text in said if (block := last_fence(text)) is not None), "")


async def ask_judge(conversation: Conversation, artefact: str, judge: Model | None) -> str | Score:
    """The artefact as a model writes it down: as it stands at the end, at temperature 0."""
    from upshot.tasks.participants.judge import extract_artefact

    assert judge is not None  # refused by `ExtractedMetric`
    return await extract_artefact(judge, artefact, conversation)


Extractor = Callable[[Conversation, str, Model | None], Awaitable[str | Score]]
"""The artefact's text, empty where there is none; or a missing score that says why it could not be told."""
WAYS: Mapping[str, Extractor] = {"fence": last_block, "judge": ask_judge, "last": last_message}


class ExtractedMetric(Metric):
    """A metric of the artefact instead of the whole conversation."""

    def __init__(self, artefact: str, inner: Metric, how: str, judge: Model | None = None, where: str = "") -> None:
        """how: by `judge`, from the last code `fence`, or the `last` message itself."""
        check_extraction(artefact, how, where)
        if how == "judge" and judge is None:
            place = f" in {where}" if where else ""
            raise UserError(
                f"extracting a {artefact}{place} needs a judge model; name one, or set extract: fence or extract: last"
            )
        self.artefact = artefact
        self.inner = inner
        self.intrinsic = inner.intrinsic
        self._extract = WAYS[how]
        self._judge = judge

    async def score(self, conversation: Conversation) -> Score:
        """The inner metric's score of the artefact; missing when it could not be extracted."""
        found = await self._extract(conversation, self.artefact, self._judge)
        if isinstance(found, Score):
            return found
        given = await limited(self.inner, self.inner.score, ending_with(conversation, found))
        score = Score.of(given, f"metric '{type(self.inner).__name__}'")
        detail = {self.artefact: found, **score.detail}
        if not found.strip():
            detail["absent"] = True
        return Score(score.value, score.reason, detail)

    async def aclose(self) -> None:
        """Close the inner metric."""
        await self.inner.aclose()


def ending_with(conversation: Conversation, artefact: str) -> Conversation:
    """The row's opening followed by the artefact as the only thing the assistant said."""
    only = Conversation(conversation.row, conversation.seed, conversation.key)
    only.session = dict(conversation.session)
    only.say(Message("assistant", artefact))
    return only


def last_fence(text: str) -> str | None:
    """The content of the last fenced block of a text."""
    lines = text.split("\n")  # by lines: one pattern for all of this is quadratic in fences that nobody closes
    fences = [(number, fence[1], fence[2]) for number, line in enumerate(lines) if (fence := _FENCE.fullmatch(line))]
    closed = {mark: number for number, mark, rest in fences if not rest.strip()}
    found, opened, start = None, "", 0
    for number, mark, rest in fences:
        if opened == mark and not rest.strip():
            found, opened = "\n".join(lines[start:number]), ""
        elif not opened and closed.get(mark, -1) > number:
            opened, start = mark, number + 1
    return found.rstrip("\n") if found is not None else None


def check_extraction(artefact: str, how: str, where: str = "") -> None:
    """Raise when the artefact is misspelled or the way to find it unknown."""
    place = f" in {where}" if where else ""
    if artefact not in ARTEFACTS and difflib.get_close_matches(artefact, ARTEFACTS, 1, TYPO):
        raise UserError(f"unknown artefact '{artefact}'{place}; {did_you_mean(artefact, ARTEFACTS)}")
    if how not in WAYS:
        raise UserError(f"unknown way '{how}' to extract a {artefact}{place}; {did_you_mean(how, WAYS)}")
