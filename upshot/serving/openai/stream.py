"""Text of a growing sequence: only whole characters, and nothing that may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upshot.core.thought import overlap_length
from upshot.models.openai_format import cut_at_stop

WINDOW = 32
"""About how many ids are decoded again for every new one."""
CONTEXT = 8
"""Final ids that stay in the window, as decoders treat the beginning of a text differently (they strip a space)."""


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
        """How many characters at the beginning of the window are final."""
        self._whole = 0
        """A number of ids that ends with a whole character: the next window may begin there."""

    def add(self, token: int, last: bool = False) -> str:
        """The text that is final now and was not sent yet."""
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
        """Called where a character ends: move the window's beginning to an earlier such place if it has become long."""
        if len(self.ids) - self._whole < CONTEXT:
            return
        if len(self.ids) - self._window > WINDOW:
            context = self._decode(self._whole)
            if context.strip() and text.endswith(context.lstrip()):  # else it decodes differently on its own
                self._settled, self._window, self._context = text, self._whole, len(context)
        self._whole = len(self.ids)
