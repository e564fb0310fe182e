"""Separates words and tool calls in a text that grows.

A parser reads the pieces of one text and returns words and calls in their order. It decides only what no continuation
can change, so it does not matter where the pieces are split. A call is returned whole. Text that begins like a call but
is not one is words. Blanks next to a call are dropped: templates write their own.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from upshot.config.registry import Registry
from upshot.core.errors import UserError
from upshot.core.thought import overlap_length


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = ""
    """The model's own id for it, if it writes one."""


Part = str | ToolCall
ParseStep = tuple[Sequence[Part], int]
"""The parts of a text up to some character, and the number of these characters."""


class CallParser(ABC):
    """Reads one text in the format of one family of models."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that announce a call; if they are special tokens, they are kept in the text."""
    key: ClassVar[str] = "arguments"
    """The key of the arguments in a call's JSON object."""
    between: ClassVar[str] = ""
    """The text between a call's name and the JSON of its arguments; empty: one object holds both."""

    def __init__(self) -> None:
        self.held = ""
        """Text that is not decided yet."""
        self._blank = ""
        self._after_call = False
        self._extent: Extent | None = None
        """The extent of the JSON value that is being read."""

    @abstractmethod
    def next(self, final: bool) -> ParseStep | None:
        """The first parts of the held text, or None if they are not decided yet (never if the text is `final`)."""

    @classmethod
    @abstractmethod
    def known(cls, template: str) -> bool:
        """Whether a chat template writes calls in this way."""

    @classmethod
    @abstractmethod
    def grammar(cls, mark: Callable[[str], str], several: bool) -> str:
        """Lark rule `calls`: a call or `several`; `body` is the rule of one, `mark` spells a marker."""

    @staticmethod
    def new_id() -> str:
        """A fresh id for a call."""
        return "call_" + uuid.uuid4().hex[:24]

    def feed(self, text: str) -> list[Part]:
        """The parts that are decided now and were not before."""
        self.held += text
        return self._drain(final=False)

    def finish(self) -> list[Part]:
        """The rest, at the end of the text."""
        out = self._drain(final=True)
        blank, self._blank = self._blank, ""
        return [*out, blank] if blank and not self._after_call else out

    def _drain(self, final: bool) -> list[Part]:
        out: list[Part] = []
        while self.held and (step := self.next(final)) is not None:
            parts, used = step
            self.held = self.held[used:]
            for part in parts:
                out += self._beside_calls(part)
        return out

    def _beside_calls(self, part: Part) -> list[Part]:
        """A part without the blanks between it and a call."""
        if isinstance(part, ToolCall):
            self._blank, self._after_call = "", True
            return [part]
        text = self._blank + part
        if self._after_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if not kept:
            return []
        self._after_call = False
        return [kept]

    def json_at(self, start: int, final: bool) -> tuple[int, Any] | None:
        """Where the JSON that begins at a place of the held text ends, and its value (None: it is not JSON).

        Returns None if the JSON is not complete yet and more text may come."""
        self._extent = self._extent or Extent(start)
        ended = self._extent.end(self.held)
        if ended is None:
            return (len(self.held), None) if final else None
        end, whole = ended
        self._extent = None
        return end, parse_json(self.held[start:end]) if whole else None

    def call_at(self, start: int, final: bool) -> tuple[Part, int] | None:
        """The call whose JSON begins at a place of the held text, or that text if it is not a call; and where it
        ends."""
        ended = self.json_at(start, final)
        return None if ended is None else (call_of(ended[1]) or self.held[: ended[0]], ended[0])

    def words(self, final: bool) -> ParseStep | None:
        """Words up to the next marker, or up to a possible beginning of one."""
        places = [at for marker in self.markers if (at := self.held.find(marker)) >= 0]
        end = min(places) if places else len(self.held) - (0 if final else overlap_length(self.held, self.markers))
        return ([self.held[:end]], end) if end else None


class Extent:
    """Finds the end of a JSON object or array in a text; continues where it stopped as the text grows."""

    _WEIGHTY = re.compile(r'[{}\[\]"<]')
    _STRING = re.compile(r'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0
        self._quoted = False

    def end(self, text: str) -> tuple[int, bool] | None:
        """(position, whether it is balanced), or None if it is not complete. JSON has no `<` outside of strings."""
        while True:
            if self._quoted:
                inside = self._STRING.match(text, self._at)
                assert inside is not None
                self._at = inside.end()
                if not inside[1]:
                    return None
                self._quoted = False
            mark = self._WEIGHTY.search(text, self._at)
            if mark is None:
                self._at = len(text)
                return None
            if mark[0] == "<":
                return mark.start(), False
            self._at = mark.end()
            self._quoted = mark[0] == '"'
            self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark[0], 0)
            if self._depth == 0 and not self._quoted:
                return self._at, True


def call_of(data: Any) -> ToolCall | None:
    """The call that a JSON value describes, if it does."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        return None
    arguments = data.get("arguments", data.get("parameters"))
    if isinstance(arguments, str):  # the object as a text, as OpenAI itself writes it
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(data["name"], json.dumps(arguments, ensure_ascii=False), str(data.get("id") or ""))


def parse_json(text: str) -> Any:
    """A JSON value, None if the text is not JSON; line breaks inside strings are accepted, since models write them."""
    try:
        value = json.loads(text, strict=False, parse_constant=refuse_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # neither 1e999 nor half a surrogate pair
    except (ValueError, RecursionError):
        return None
    return value


def refuse_constant(name: str) -> Any:
    """Refuse NaN and the infinities, which Python reads, but JSON does not have."""
    raise ValueError(f"{name} is not a JSON number")


parsers: Registry[CallParser] = Registry("tool parser", "upshot.models.tool_calls", base=CallParser)


def parser_for(template: str, name: str = "auto") -> type[CallParser] | None:
    """The parser called `name`, or the one whose words the chat template uses; None if there is no such parser."""
    if name == "none":
        return None
    if name != "auto":
        parser = parsers.get(name, "--tool-parser")
        if not (isinstance(parser, type) and issubclass(parser, CallParser)):
            raise UserError(f"tool parser '{name}' is not a subclass of upshot.models.tool_calls.base:CallParser")
        return parser
    kinds = (parsers.get(known) for known in parsers.names())
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, CallParser) and k.known(template)), None)
