"""Where a model thinks: spans of tokens between think markers. Pure functions.

Markers are found in the text that the tokens spell, so they may be one special token, several tokens, or begin and end
inside a token. A token that spells any piece of a marker belongs to the marker. The thought is what stands between the
first opening marker and the next closing one:

- no closing marker: the rest is thought, and there is no answer;
- no opening marker but a closing one: the thought begins at the first token (templates that open it in the prompt);
- neither: all is answer, unless the prompt had `opened` the thought: then all is thought.

Further markers are part of what they stand in.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

MARKERS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Thought:
    """Token positions: the thought is [start, stop), the answer begins at `answer`."""

    start: int
    stop: int
    answer: int

    @property
    def empty(self) -> bool:
        """Whether nothing was thought."""
        return self.start >= self.stop


def find_thought(pieces: Sequence[str], markers: tuple[str, str] = MARKERS, opened: bool = False) -> Thought | None:
    """The thought among tokens that spell `pieces`; None when all is answer."""
    text = "".join(pieces)
    opening, closing = markers
    begin = text.find(opening)
    if opened and text[: max(begin, 0)].strip():  # said again in the middle of a thought that the prompt had opened
        begin = -1
    start_text = begin + len(opening) if begin >= 0 else 0
    end = text.find(closing, start_text)
    if begin < 0 and end < 0 and not opened:
        return None
    ends = list(accumulate(map(len, pieces)))
    start = _after(ends, start_text)
    if end < 0:
        return Thought(min(start, len(pieces)), len(pieces), len(pieces))
    stop = _before(ends, end)
    return Thought(min(start, stop), stop, _after(ends, end + len(closing)))


def _before(ends: Sequence[int], position: int) -> int:
    """How many tokens lie wholly before a character position."""
    return bisect_right(ends, position)


def _after(ends: Sequence[int], position: int) -> int:
    """The first token that begins at or after a character position."""
    return bisect_left(ends, position) + 1 if position > 0 else 0


def after_thought(text: str, markers: tuple[str, str] = MARKERS) -> str:
    """What a text says after its thought; the whole where it has none, nothing where the thought never ends."""
    opening, closing = markers
    begin = text.find(opening)
    end = text.find(closing, begin + len(opening) if begin >= 0 else 0)
    if end >= 0:
        return text[end + len(closing) :]
    return "" if begin >= 0 else text
