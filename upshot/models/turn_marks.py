"""Finds what a chat template writes between speakers, by rendering conversations with known words."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from upshot.core.errors import UserError
from upshot.models.tokens import GUARD, SpecialTokens

_SAID = [f"{GUARD}{number}{GUARD}" for number in range(4)]
_USER = {"role": "user", "content": _SAID[0]}
_REPLY = {"role": "assistant", "content": _SAID[1]}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
_TALKS = [[_USER, _REPLY, {"role": "user", "content": _SAID[2]}], [{"role": "system", "content": _SAID[3]}, _USER]]
_TOOL_TALK: list[dict[str, Any]] = [
    _USER,
    {**_REPLY, "tool_calls": [_CALL]},
    {"role": "tool", "content": _SAID[2], "tool_call_id": "call00001", "name": "f"},
]

Fill = Callable[[list[dict[str, Any]]], str]
"""Renders messages, up to where the policy speaks; `UserError` where the template refuses them."""


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """The marks of a template that are not special tokens anyway."""

    tokens: frozenset[str]
    """Added tokens between speakers."""
    of_tools: frozenset[str]
    """Added tokens around tool calls and results only; all but tools may mention them."""
    words: frozenset[str]
    """Lines of ordinary text between speakers, where no token stands."""


def find_turn_marks(tokenizer: Any, fill: Fill, think: Collection[str]) -> TurnMarks:
    """The marks between the speakers of a template; `think`: markers that mark thoughts instead."""
    special = {*SpecialTokens(tokenizer).tokens}
    added = {token.content for token in tokenizer.added_tokens_decoder.values()} - special
    talk, tools = [*_seams(fill, _TALKS)], [*_seams(fill, [_TOOL_TALK])]
    tokens = {token for token in added.difference(think) if any(token in seam for seam in talk)}
    of_tools = {token for token in added.difference(think) - tokens if any(token in seam for seam in tools)}
    plain = [seam for seam in (*talk, *tools) if not any(token in seam for token in special | added)]
    lines = {line.strip() for seam in plain for line in seam.splitlines()}
    words = {line for line in lines if sum(map(str.isalpha, line)) > 1}  # not the brackets of JSON
    return TurnMarks(frozenset(tokens), frozenset(of_tools), frozenset(words))


def _seams(fill: Fill, talks: list[list[dict[str, Any]]]) -> Iterator[str]:
    """The text that follows each speaker's words."""
    for talk in talks:
        try:
            rendered = fill(talk)
        except UserError:
            continue  # a template without such roles
        yield from re.split("|".join(_SAID), rendered)[1:]
