"""Text of a sequence as it grows: whole characters only, nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class GrowingText:
    """Turns ids that arrive one by one into pieces of text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.ids: list[int] = []
        self.sent = ""
        self._settled = ""
        self._tail: list[int] = []

    def add(self, token: int, last: bool = False) -> str:
        """The text that is certain now and was not sent yet."""
        self.ids.append(token)
        self._tail.append(token)
        tail = self.tokenizer.decode(self._tail, skip_special_tokens=True)
        text = self._settled + tail
        whole = not tail.endswith("�")
        if whole and len(self._tail) > 32:  # decode again only what is new, from a point where characters are whole
            self._settled, self._tail = text, []
        cut = min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=-1)
        if cut >= 0:
            text = text[:cut]
        elif not last:
            text = text[: len(text) - self._held_back(text)]
            if not whole:
                text = text.rstrip("�")
        new = text[len(self.sent) :]
        self.sent += new
        return new

    def _held_back(self, text: str) -> int:
        """Length of the longest end of the text that could begin a stop string."""
        longest = 0
        for stop in self.stops:
            for n in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:n]):
                    longest = n
                    break
        return longest
