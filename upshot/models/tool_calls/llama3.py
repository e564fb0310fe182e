"""Llama 3.1 and later: `{"name": …, "parameters": {…}}` as the whole reply or after `<|python_tag|>`, several by `;`.

The reply of a model that calls nothing may hold JSON too: only what it begins with can be a call.
"""

from __future__ import annotations

from collections.abc import Callable

from upshot.core.thought import overlap_length
from upshot.models.tool_calls.base import CallParser, ParseStep, ToolCall, parsers

TAG = "<|python_tag|>"


@parsers.register("llama3")
class Llama3(CallParser):
    """Calls without a closing mark: the JSON says where each ends."""

    markers = (TAG,)
    key = "parameters"

    def __init__(self) -> None:
        super().__init__()
        self._here = True
        """A call may stand here."""
        self._called = False
        """What came last is a call."""

    def next(self, final: bool) -> ParseStep | None:
        """A call where one may stand, or words. A mark or a semicolon is a call's only where an object follows it."""
        text = self.held.lstrip()
        tagged = text.startswith(TAG)
        head = len(TAG) if tagged else int(self._called and text.startswith(";"))
        if head or self._here:
            body = text[head:].lstrip()
            if not body:
                return ([self.held], len(self.held)) if final else None
            if body.startswith("{"):
                part = self.call_at(len(self.held) - len(body), final)
                if part is None:
                    return None
                self._here = self._called = isinstance(part[0], ToolCall)
                return [part[0]], part[1]
            if not tagged and not final and overlap_length(body, self.markers) == len(body):
                return None
        self._here = self._called = False
        if tagged:
            used = len(self.held) - len(text) + len(TAG)
            return [self.held[:used]], used
        return self.words(final)

    @classmethod
    def known(cls, template: str) -> bool:
        """The headers of Llama 3, and the role of what a tool answers."""
        return "<|start_header_id|>" in template and "ipython" in template

    @classmethod
    def grammar(cls, mark: Callable[[str], str], several: bool) -> str:
        """Bare objects."""
        return 'calls: body ("; " body)*' if several else "calls: body"
