"""Hermes, Qwen 2.5 and 3, SmolLM3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them."""

from __future__ import annotations

from collections.abc import Callable

from upshot.core.thought import overlap_length
from upshot.models.tool_calls.base import CallParser, ParseStep, ToolCall, parsers

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@parsers.register("hermes", "qwen")
class Hermes(CallParser):
    """Calls between tags; one whose closing tag never comes counts too."""

    markers = (OPENING, CLOSING)

    def __init__(self) -> None:
        super().__init__()
        self._closing = False
        """A call was read: its closing tag comes next."""

    def next(self, final: bool) -> ParseStep | None:
        """A call, the tag that closes one, or words."""
        if self._closing:
            return self._close(final)
        if not self.held.startswith(OPENING):
            if self.held.startswith(CLOSING):  # of no call
                return [CLOSING], len(CLOSING)
            return self.words(final)
        body = self.held[len(OPENING) :].lstrip()
        if not body.startswith("{"):
            return ([OPENING], len(OPENING)) if body or final else None
        part = self.call_at(len(self.held) - len(body), final)
        if part is None:
            return None
        self._closing = isinstance(part[0], ToolCall)
        return [part[0]], part[1]

    def _close(self, final: bool) -> ParseStep | None:
        text = self.held.lstrip()
        blanks = len(self.held) - len(text)
        closed = text.startswith(CLOSING)
        if not closed and not final and overlap_length(text, [CLOSING]) == len(text):
            return None
        self._closing = False
        return [], blanks + (len(CLOSING) if closed else 0)

    @classmethod
    def known(cls, template: str) -> bool:
        """The tag, and JSON in it: Qwen3-Coder puts XML there."""
        return OPENING in template and "<function=" not in template

    @classmethod
    def grammar(cls, mark: Callable[[str], str], several: bool) -> str:
        """Calls a line each, as the templates write them."""
        more = ' ("\\n" call)*' if several else ""
        return f'calls: call{more}\ncall: {mark(OPENING)} "\\n" body "\\n" {mark(CLOSING)}'
