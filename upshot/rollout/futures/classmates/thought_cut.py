"""How much of a thought is handed on, and where it is cut. Pure functions.

`1`: all of it. A share r: its first max(1, int(n·r)) tokens. `first-K-tokens`, `last-K-tokens`. [low, high]: a share
drawn for each reply from its own random stream.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from upshot.core.conversation import Conversation, Sample, derive_seed

_TOKENS = re.compile(r"(first|last)-(\d+)-tokens")


@dataclass(frozen=True, slots=True)
class ThoughtCut:
    """Which tokens of a thought are kept."""

    low: float = 1.0
    high: float = 1.0
    """A share drawn between the two; equal: just that share."""
    first: int = 0
    """When set: this many tokens from the beginning."""
    last: int = 0
    """When set: this many tokens from the end."""

    @classmethod
    def parse(cls, spec: Any) -> ThoughtCut:
        """A keep spec of a recipe; `ValueError` for anything else."""
        if isinstance(spec, ThoughtCut):
            return spec
        pair = (spec, spec) if _is_share(spec) else spec
        if isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_share, pair)) and pair[0] <= pair[1]:
            return cls(float(pair[0]), float(pair[1]))
        tokens = _TOKENS.fullmatch(spec) if isinstance(spec, str) else None
        if tokens and int(tokens[2]) > 0:
            return cls(first=int(tokens[2])) if tokens[1] == "first" else cls(last=int(tokens[2]))
        raise ValueError("give a share above 0 and up to 1, [low, high], 'first-K-tokens' or 'last-K-tokens'")

    def span(self, start: int, stop: int, rng: random.Random) -> tuple[int, int]:
        """The kept tokens of the thought [start, stop); empty only when the thought is."""
        length = stop - start
        if length <= 0:
            return start, start
        if self.last:
            return stop - min(self.last, length), stop
        share = self.low if self.low == self.high else rng.uniform(self.low, self.high)
        return start, start + min(self.first or max(1, int(length * share)), length)


def _is_share(spec: Any) -> bool:
    return isinstance(spec, int | float) and not isinstance(spec, bool) and 0 < spec <= 1


WHOLE_THOUGHT = ThoughtCut()


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A thought up to a point: token positions in the episode's ids, and the text that is handed on."""

    number: int
    begin: int
    """Where what is handed on begins."""
    start: int
    """Where the stretch begins that this cut adds to the one before."""
    stop: int
    text: str


Decode = Callable[[Sequence[int]], str]


def cut_thought(
    conversation: Conversation, keep: ThoughtCut, stretches: int, decode: Decode, whole_reply: bool
) -> list[CutPoint]:
    """What is handed on of the last turn's thought, at the end of each stretch; nothing where there is no thought.

    `whole_reply`: all that was sampled counts as the thought, markers or not.
    """
    place = last_sample(conversation)
    if place is None:
        return []
    at, sample = place
    start, stop = thought_span(sample, whole_reply)
    if whole_reply and sample.finish == "stop" and not decode(sample.ids[-1:]):
        stop -= 1  # the end-of-turn token does not belong to the thought
    first, last = keep.span(start, stop, random.Random(derive_seed(conversation.seed, "keep")))
    edges = [first + (last - first) * number // stretches for number in range(stretches + 1)]
    cuts = []
    for number, (low, high) in enumerate(pairwise(edges), 1):
        # A cut may fall inside a character: the incomplete half is not handed over.
        text = decode(sample.ids[first:high]).strip("\ufffd").strip()
        if high > low and text:
            cuts.append(CutPoint(number, at + first, at + low, at + high, text))
    return cuts


_FINAL = re.compile(r"(?<![\w.])(-?\d[\d,]*(?:\.\d+)?|\([A-Z]\)|[B-HJ-Z]|[AI](?! (?!is\b)[a-z]))(?!\w|\.\d)")
"""A number, or a letter that stands alone; 'a' and 'I' before a word are words."""
MASK = "___"


def mask_answer(thought: str, answer: str) -> str:
    """A thought without the final number or letter: that of the answer, else (where it has none) its own last one.

    It is cut wherever it stands alone, however it is written (1,000 and 1000.0 alike): a number that is the answer by
    chance goes, too, and an answer in words stays.
    """
    finals = _FINAL.findall(answer) or _FINAL.findall(thought)
    if not finals:
        return thought
    final = _plain(finals[-1])
    return _FINAL.sub(lambda match: MASK if _plain(match[1]) == final else match[0], thought)


def _plain(final: str) -> str:
    """A number by its value, a letter without parentheses."""
    text = final.replace(",", "").strip("()")
    return f"{float(text):g}" if text[-1].isdigit() else text


def thought_span(sample: Sample, whole_reply: bool) -> tuple[int, int]:
    """Where the thought of a turn stands among its ids; empty where it has none."""
    return (0, len(sample.ids)) if whole_reply else sample.thought or (0, 0)


def last_sample(conversation: Conversation) -> tuple[int, Sample] | None:
    """The policy's last turn, and where it begins in the episode's ids."""
    return next(iter(reversed(list(conversation.places()))), None)
