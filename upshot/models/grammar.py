"""JSON schemas as grammars over token ids, by llguidance (optional extra `schema`).

llguidance was taken over xgrammar and outlines-core because one abi3 wheel serves all Pythons and platforms, it needs
no torch, and a mask takes tens of microseconds without compiling the schema first.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from upshot.core.errors import UserError
from upshot.engine.sequence import Grammar
from upshot.models.base import Abilities

INSTALL = "pip install -e '.[schema]'"
WHITESPACE = r"\n? {0,8}"
"""The whitespace allowed between two parts of a JSON text. Without a limit, weak models may never stop writing it."""


def available() -> bool:
    """Whether the JSON schema library is installed."""
    return importlib.util.find_spec("llguidance") is not None


def local_abilities() -> Abilities:
    """What every model in this process can do; it enforces schemas where the library is installed."""
    return Abilities(True, True, schema=available(), lengths=available(), seed=True, scores=True)


def missing_library() -> str:
    """Why a model in this process enforces no schema; empty where it does."""
    return "" if available() else f"strict JSON is only enforced with the library llguidance: {INSTALL}"


class JsonGrammar:
    """The state of one text that must follow a schema."""

    def __init__(self, matcher: Any, words: int) -> None:
        from llguidance.numpy import allocate_token_bitmask

        self.matcher = matcher
        self._mask = allocate_token_bitmask(1, words)

    def allowed(self) -> np.ndarray:
        """Bit mask of the ids that may come next."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self.matcher, self._mask, 0)
        return self._mask[0].view(np.uint32)

    def accept(self, token: int) -> bool:
        """Take the sampled id; True when the text is complete."""
        if not self.matcher.consume_token(token):
            raise RuntimeError(f"the grammar refused token id {token}: {self.matcher.get_error()}")
        return bool(self.matcher.is_stopped())

    def copy(self) -> JsonGrammar:
        """A copy of the state, for a fork."""
        twin = JsonGrammar.__new__(JsonGrammar)
        twin.matcher, twin._mask = self.matcher.deep_copy(), self._mask.copy()
        return twin


class SchemaCompiler:
    """Makes grammars for one tokenizer."""

    def __init__(self, tokenizer: Any, vocab: int, end_ids: set[int]) -> None:
        from llguidance.hf import from_tokenizer

        self.vocab = vocab
        # Any of them may end the text: the smallest is often not the one that the model's chats end with.
        try:
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab, eos_token=sorted(end_ids) or None)
        except ValueError as error:
            raise UserError(
                f"JSON cannot be enforced on '{tokenizer.name_or_path}', whose tokenizer has no bytes ({error}); "
                f"use a model with a byte-level tokenizer"
            ) from None

    def grammar(self, schema: Mapping[str, Any]) -> Callable[[], Grammar]:
        """A factory of fresh grammar states for a schema."""
        from llguidance import LLMatcher

        options = {"whitespace_pattern": WHITESPACE, **schema.get("x-guidance", {})}
        text = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": options}))
        return self._states(text, "the JSON schema")

    def lark(self, rules: str) -> Callable[[], Grammar]:
        """A factory of fresh grammar states for Lark rules in llguidance's form."""
        from llguidance import LLMatcher

        return self._states(LLMatcher.grammar_from_lark(rules), "the grammar of the tool calls")

    def _states(self, text: str, what: str) -> Callable[[], Grammar]:
        from llguidance import LLMatcher

        trouble = LLMatcher.validate_grammar(text, self._tokenizer)
        if trouble:
            raise UserError(f"{what} cannot be enforced: {trouble}")
        return lambda: JsonGrammar(LLMatcher(self._tokenizer, text), self.vocab)
