"""Splits a model's text into the parts of a chat message: its thought, its words, its tool calls.

The text of the chat template shows how a model thinks and calls tools. Whole answers and streams use the same code: a
whole answer is a stream of one piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upshot.core.errors import UserError
from upshot.core.thought import MARKERS, GrowingThought, opens_thought
from upshot.models.grammar import WHITESPACE
from upshot.models.openai_format import cut_at_stop
from upshot.models.tool_calls.base import CallParser, ToolCall, parser_for


class GrowingMessage:
    """The parts of one message while its text grows."""

    def __init__(self, form: ReplyFormat) -> None:
        self._parser = form.parser() if form.parser else None
        self._thought = GrowingThought(form.opened) if form.thinks else None
        self._several = form.several
        self.calls = 0

    def feed(self, text: str) -> dict[str, Any]:
        """The new parts of the message, as a stream's `delta`; {} if there are none."""
        thought, answer = ("", text) if self._thought is None else self._thought.feed(text)
        return self._delta(thought, [answer] if self._parser is None else self._parser.feed(answer))

    def finish(self) -> dict[str, Any]:
        """The rest of the message, at the end of the text."""
        thought, answer = ("", "") if self._thought is None else self._thought.finish()
        if self._parser is None:
            return self._delta(thought, [answer])
        return self._delta(thought, [*self._parser.feed(answer), *self._parser.finish()])

    def whole(self, text: str) -> dict[str, Any]:
        """A whole text as an assistant's message."""
        first, last = self.feed(text), self.finish()
        message: dict[str, Any] = {"role": "assistant"}
        for key in ("reasoning_content", "content", "tool_calls"):
            if key in first or key in last:
                empty: Any = [] if key == "tool_calls" else ""
                message[key] = first.get(key, empty) + last.get(key, empty)
        message.setdefault("content", None if self.calls else "")
        for call in message.get("tool_calls", ()):
            del call["index"]  # only streams need it
        return message

    def ending(self, finish: str) -> str:
        """Why the message ended, as OpenAI's `finish_reason`."""
        return "tool_calls" if self.calls and finish == "stop" else finish

    def _delta(self, thought: str, parts: Iterable[str | ToolCall]) -> dict[str, Any]:
        delta: dict[str, Any] = {"reasoning_content": thought} if thought else {}
        for part in parts:
            if isinstance(part, ToolCall):
                if self._several or not self.calls:
                    delta.setdefault("tool_calls", []).append(self._call(part))
            elif part:
                delta["content"] = delta.get("content", "") + part
        return delta

    def _call(self, call: ToolCall) -> dict[str, Any]:
        assert self._parser is not None
        index, call_id = self.calls, call.id or self._parser.new_id()
        self.calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the replies to one request are read."""

    tokenizer: Any
    parser: type[CallParser] | None = None
    thinks: bool = False
    opened: bool = False
    """Whether the prompt has opened the thought."""
    several: bool = True
    """Whether calls after the first are kept."""
    hidden: frozenset[int] = frozenset()
    """Special tokens to leave out of the text; empty: all of them."""

    def read(self, ids: Sequence[int], stops: Sequence[str], finish: str) -> tuple[dict[str, Any], str]:
        """A whole reply as an assistant's message, and why it ended."""
        message = GrowingMessage(self)
        text, _ = cut_at_stop(self.decode(ids), stops)
        return message.whole(text), message.ending(finish)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of sampled ids; of the special tokens, only the markers that the parser reads."""
        if not self.hidden:
            return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        shown = [token for token in ids if token not in self.hidden]
        return str(self.tokenizer.decode(shown, skip_special_tokens=False))


class Dialect:
    """How the model behind a tokenizer thinks and calls tools."""

    def __init__(self, tokenizer: Any, tool_parser: str = "auto") -> None:
        template = str(getattr(tokenizer, "chat_template", None) or "")
        self.tokenizer = tokenizer
        self.parser = parser_for(template, tool_parser)
        self.thinks = MARKERS[1] in template
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {token: str(entry) for token, entry in added.items() if entry.special}

    def reply_format(self, prompt: Sequence[int], tools: bool, schema: bool, several: bool) -> ReplyFormat:
        """How to read the replies to a prompt; with a schema, the text is JSON from its first character."""
        if schema:
            return ReplyFormat(self.tokenizer)
        parser = self.parser if tools else None
        markers = {*(parser.markers if parser else ()), *(MARKERS if self.thinks else ())}
        read = {token for token, text in self._special.items() if text in markers}
        hidden = frozenset(self._special.keys() - read) if read else frozenset()
        opened = self.thinks and opens_thought(self.tokenizer.decode(list(prompt[-16:]), skip_special_tokens=False))
        return ReplyFormat(self.tokenizer, parser, self.thinks, opened, several, hidden)

    def grammar(self, tools: Sequence[Mapping[str, Any]], form: ReplyFormat) -> str:
        """The Lark grammar of a reply that only calls these tools; it may think first."""
        if self.parser is None:
            raise UserError(
                "tool_choice: the format of this model's tool calls is not known here; start the server "
                "with --tool-parser NAME, or ask with tool_choice auto"
            )
        opening, closing = map(self._mark, MARKERS)
        start = "start: calls"
        if form.thinks:
            start = "start: thought calls" if form.opened else f"start: ({opening} thought)? calls"
            ends = f"/(?s:.*)/ {closing}" if closing.startswith("<[") else f"until\nuntil[suffix={closing}]: /(?s:.*)/"
            start += f"\nthought: reason /\\n{{0,2}}/\nreason: {ends}"
        return "\n".join([start, self.parser.grammar(self._mark, form.several), self._body(self.parser, tools)])

    def _body(self, parser: type[CallParser], tools: Sequence[Mapping[str, Any]]) -> str:
        """The rule of one call."""
        if not parser.between:
            return f"body: {as_rule(call_schema(tools, parser.key))}"
        between = self._mark(parser.between)
        kinds = [f"{json.dumps(tool['function']['name'])} {between} given{i}" for i, tool in enumerate(tools)]
        arguments = [f"given{i}: {as_rule(parameters_of(tool))}" for i, tool in enumerate(tools)]
        return "\n".join([f"body: {' | '.join(kinds)}", *arguments])

    def _mark(self, marker: str) -> str:
        """A marker in Lark; a special token is given by its id, because no text can stand for it."""
        ids = [token for token, text in self._special.items() if text == marker]
        return f"<[{ids[0]}]>" if ids else json.dumps(marker)


def as_rule(schema: Mapping[str, Any]) -> str:
    """A JSON schema as the right side of a rule."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema of a tool's arguments."""
    return tool["function"].get("parameters") or {"type": "object"}


def call_schema(tools: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """JSON schema of a call of one of these tools; `key` holds the arguments."""
    kinds, definitions = [], {}
    for number, tool in enumerate(tools):
        place = f"tool{number}"
        definitions[place] = relocate(parameters_of(tool), f"#/$defs/{place}")
        properties = {"name": {"const": tool["function"]["name"]}, key: {"$ref": f"#/$defs/{place}"}}
        closed = {"required": ["name", key], "additionalProperties": False}
        kinds.append({"type": "object", "properties": properties, **closed})
    return {"anyOf": kinds, "$defs": definitions}


def relocate(schema: Any, place: str) -> Any:
    """A schema with references that still hold when it is embedded in another schema."""
    if isinstance(schema, list):
        return [relocate(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    out = {key: relocate(value, place) for key, value in schema.items()}
    reference = out.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        out["$ref"] = place + reference[1:]
    return out
