"""Mistral: `[TOOL_CALLS]` and a JSON array of calls or, since 2025, `[TOOL_CALLS]name[ARGS]{…}` for each."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from upshot.models.tool_calls.base import CallParser, ParseStep, ToolCall, call_of, parsers

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
HEAD = re.compile(r"\s*(?:\[\s*|(?P<name>[\w.-]{1,64})\s*(?:\[CALL_ID\](?P<id>\w{1,64}))?\s*(?:\[ARGS\])?\s*)?")
LONGEST_HEAD = 256


@parsers.register("mistral")
class Mistral(CallParser):
    """Both of the family's forms, whichever the text has."""

    markers = (MARK, ARGS, CALL_ID)

    @staticmethod
    def new_id() -> str:
        """Nine letters and digits: the templates refuse other ids."""
        return "".join(random.SystemRandom().choices(string.ascii_letters + string.digits, k=9))

    def next(self, final: bool) -> ParseStep | None:
        """The calls after a mark, or words."""
        if not self.held.startswith(MARK):
            strays = [mark for mark in self.markers if self.held.startswith(mark)]
            return (strays, len(strays[0])) if strays else self.words(final)
        brace = self.held.find("{", len(MARK), len(MARK) + LONGEST_HEAD)
        if brace < 0:
            return ([MARK], len(MARK)) if final or len(self.held) >= len(MARK) + LONGEST_HEAD else None
        head = HEAD.fullmatch(self.held, len(MARK), brace)
        if head is None:
            return [MARK], len(MARK)
        array = self.held.find("[", len(MARK), brace) if head["name"] is None else -1
        start = array if array >= 0 else brace
        ended = self.json_at(start, final)
        if ended is None:
            return None
        end, data = ended
        if head["name"] is not None and data is not None:
            data = {"name": head["name"], "arguments": data, "id": head["id"]}
        calls = _calls(data if isinstance(data, list) else [data])
        return calls or [self.held[:end]], end

    @classmethod
    def known(cls, template: str) -> bool:
        """The mark, and nothing of the newer form."""
        return MARK in template and ARGS not in template

    @classmethod
    def grammar(cls, mark: Callable[[str], str], several: bool) -> str:
        """The array."""
        more = ' (", " body)*' if several else ""
        return f'calls: {mark(MARK)} "[" body{more} "]"'


@parsers.register("mistral-args")
class MistralArgs(Mistral):
    """What is read is the same; a call that is demanded is written in the newer form."""

    between = ARGS

    @classmethod
    def known(cls, template: str) -> bool:
        """Both marks."""
        return MARK in template and ARGS in template

    @classmethod
    def grammar(cls, mark: Callable[[str], str], several: bool) -> str:
        """A mark for each."""
        return f"calls: ({mark(MARK)} body)+" if several else f"calls: {mark(MARK)} body"


def _calls(items: Sequence[Any]) -> list[ToolCall]:
    """The calls of an array, all or none."""
    calls = [call_of(item) for item in items]
    return [call for call in calls if call is not None] if None not in calls else []
