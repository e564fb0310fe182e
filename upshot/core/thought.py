"""Where a model thinks: spans of tokens between think markers. Pure functions.

Markers are found in the text that the tokens spell, so they may be one special token, several tokens, or begin and end
inside a token. A token that spells any part of a marker belongs to the marker. The thought is the text between the
first opening marker and the next closing one:

- no closing marker: the rest is thought, and there is no answer;
- no opening marker but a closing one: the thought begins at the first token (templates that open it in the prompt);
- neither: all is answer, unless the prompt had `opened` the thought: then all is thought.

Further markers are ordinary text.

`GrowingThought` splits a text while it grows, when nothing can be taken back: there, a closing marker without an
opening one is text.
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


def find_thought(pieces: Sequence[str], markers: tuple[str, str] = MARKERS, opened: bool = False) -> Thought | None:
    """The thought among tokens that spell `pieces`; None if all is answer."""
    text = "".join(pieces)
    opening, closing = markers
    begin = text.find(opening)
    if opened and text[: max(begin, 0)].strip():  # repeated in the middle of a thought that the prompt had opened
        begin = -1
    start_text = begin + len(opening) if begin >= 0 else 0
    end = text.find(closing, start_text)
    if begin < 0 and end < 0 and not opened:
        return None
    ends = list(accumulate(map(len, pieces)))
    start = _after(ends, start_text)
    if end < 0:
        return Thought(min(start, len(pieces)), len(pieces), len(pieces))
    stop = bisect_right(ends, end)  # the number of tokens that lie completely before the marker
    return Thought(min(start, stop), stop, _after(ends, end + len(closing)))


def _after(ends: Sequence[int], position: int) -> int:
    """The first token that begins at or after a character position."""
    return bisect_left(ends, position) + 1 if position > 0 else 0


def split_thought(text: str, markers: tuple[str, str] = MARKERS) -> tuple[str, str]:
    """(thought, answer) of a whole text: without markers, all is answer; if the thought never ends, nothing is."""
    span = find_thought(text, markers)  # each of its characters a token
    return ("", text) if span is None else (text[span.start : span.stop].strip(), text[span.answer :].lstrip())


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends inside a thought that it has just opened."""
    return prompt.rstrip().endswith(MARKERS[0])


def overlap_length(text: str, strings: Sequence[str]) -> int:
    """Length of the longest end of a text that could be the beginning of one of these strings."""
    beginnings = (string[:n] for string in strings for n in range(1, len(string)))
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)


class GrowingThought:
    """Splits a text that arrives in pieces into thought and answer; blanks beside the markers belong to neither."""

    def __init__(self, opened: bool) -> None:
        self._inside = opened
        self._awaited = list(MARKERS[1:] if opened else MARKERS[:1])
        """The marker that may come next."""
        self._held = ""
        self._fresh = opened
        """Whether a marker came last, so that blanks are dropped."""
        self._repeated = opened
        """Whether the prompt had opened the thought, so that an opening marker at the beginning only repeats it."""

    def feed(self, text: str) -> tuple[str, str]:
        """(thought, answer) that are certain now and were not before."""
        self._held += text
        return self._drain(final=False)

    def finish(self) -> tuple[str, str]:
        """The rest, at the end of the text."""
        return self._drain(final=True)

    def _drain(self, final: bool) -> tuple[str, str]:
        parts = ["", ""]
        while True:
            if self._fresh:
                self._held = self._held.lstrip()
            if self._repeated:
                opening = MARKERS[0]
                if not final and overlap_length(self._held, [opening]) == len(self._held):
                    break
                self._held = self._held.removeprefix(opening)
                self._repeated = False
                continue
            before, marker, after = self._held.partition(self._awaited[0]) if self._awaited else (self._held, "", "")
            if marker:
                self._say(parts, before.rstrip())
                self._held, self._inside, self._fresh = after, not self._inside, True
                self._awaited = [MARKERS[1]] if self._inside else []
                continue
            sure = before if final else before[: len(before) - overlap_length(before, self._awaited)]
            if self._awaited and not (final and not self._inside):  # blanks before a marker are dropped
                sure = sure.rstrip()
            self._say(parts, sure)
            self._held = "" if final else self._held[len(sure) :]
            break
        return parts[0], parts[1]

    def _say(self, parts: list[str], text: str) -> None:
        if text:
            parts[not self._inside] += text
            self._fresh = False
