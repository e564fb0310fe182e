"""Text of a sequence as it grows: whole characters only, nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upshot.core.thought import overlap_length
from upshot.models.openai_format import cut_at_stop

WINDOW = 32
"""Ids decoded again for every new one, about."""
CONTEXT = 8
"""Settled ids that stay in the window: decoders treat the beginning of a text differently (they strip its space)."""


class GrowingText:
    """Turns ids that arrive one by one into pieces of text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.ids: list[int] = []
        self.sent = ""
        self._settled = ""
        """Text of the ids before the window and of its context."""
        self._window = 0
        """The first id that is decoded again."""
        self._context = 0
        """Characters that the window begins with and that are settled."""
        self._whole = 0
        """So many ids ended with a whole character: the next window may begin there."""

    def add(self, token: int, last: bool = False) -> str:
        """The text that is certain now and was not sent yet."""
        self.ids.append(token)
        decoded = self._decode(self._window)
        text = self._settled + decoded[self._context :]
        whole = not decoded.endswith("�")
        if whole:
            self._settle(text)
        text, stopped = cut_at_stop(text, self.stops)
        if not stopped and not last:
            text = text[: len(text) - overlap_length(text, self.stops)]
            if not whole:
                text = text.rstrip("�")
        new = text[len(self.sent) :]
        self.sent += new
        return new

    def _decode(self, start: int) -> str:
        return self.tokenizer.decode(self.ids[start:], skip_special_tokens=True)

    def _settle(self, text: str) -> None:
        """Where characters are whole: perhaps begin the window at an earlier such place."""
        if len(self.ids) - self._whole < CONTEXT:
            return
        if len(self.ids) - self._window > WINDOW:
            context = self._decode(self._whole)
            if context.strip() and text.endswith(context.lstrip()):  # else it reads differently without what is before
                self._settled, self._window, self._context = text, self._whole, len(context)
        self._whole = len(self.ids)
