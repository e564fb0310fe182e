"""Tokens and text: keeps the words of messages from becoming special tokens, and says what a token spells.

A chat template mixes its own marks (`<|im_start|>`) with what people, tools and rows say, and a tokenizer cannot
distinguish them afterwards. So `guard` puts a character that no text has into every special token that a message
spells, the template renders the guarded words, and `encode` reads what is guarded as ordinary text and the rest as
always. Text that spells no special token is encoded by the tokenizer itself, as a whole: its ids are the template's
own.

Where text and marks have the same ids (a template whose marks are ordinary words, such as Llama 2's [/INST]; a
tokenizer whose model itself knows the special token as a word), a space is put inside: `[ /INST]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache, cached_property, lru_cache, partial
from typing import Any

GUARD = "\ufdd0"
"""Unicode reserves it for use inside programs; if a text contains it, it is replaced by U+FFFD."""
RECENT = 32
"""The number of texts whose ids are cached: all replies to a prompt begin with the same text at about the same time."""


class SpecialTokens:
    """The special tokens of one tokenizer, and how to distinguish text that spells them."""

    def __init__(self, tokenizer: Any, marks: Collection[str] = (), words: Collection[str] = ()) -> None:
        """Find them; `marks`: added tokens that count as special, too, `words`: ordinary text that no message may
        contain."""
        self.tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special), *marks}
        # A single character has no place for a guard inside it.
        self.tokens = sorted((token for token in special if len(token) > 1), key=len, reverse=True)
        self._words = {*words}
        self._any = re.compile(_any_of([*self.tokens, *words]))
        # If there is one, every character is examined, because two spellings may overlap.
        self._each = re.compile(f"(?=({self._any.pattern}))(.)", re.DOTALL)
        self._marks = re.compile(f"{GUARD}|{_any_of(self.tokens)}")
        self._normalized = any(token.normalized for token in added if token.content in special)
        self._recent = lru_cache(RECENT)(self._encode)

    def guard(self, text: str, keep: Collection[str] = ()) -> str:
        """The text with its special tokens guarded, except those to `keep`."""

        def part(match: re.Match[str]) -> str:
            spelled, first = match.groups()
            return first if spelled in keep else first + (" " if spelled in self._inseparable else GUARD)

        text = text.replace(GUARD, "\ufffd")
        return self._each.sub(part, text) if self._any.search(text) else text

    def guard_all(self, value: Any, keep: Collection[str] = ()) -> Any:
        """A JSON value with all its texts guarded, including names."""
        if isinstance(value, str):
            return self.guard(value, keep)
        if isinstance(value, Mapping):
            return {self.guard_all(name, keep): self.guard_all(item, keep) for name, item in value.items()}
        return [self.guard_all(item, keep) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without added tokens: guarded parts as ordinary text, the rest as the tokenizer does."""
        return list(self._recent(text))

    def _encode(self, text: str) -> list[int]:
        if self._backend is None or not (self._normalized or GUARD in text):
            return self.tokenizer.encode(text, add_special_tokens=False)
        encoder, original = self._strict
        marked = self._marks.sub(lambda match: "" if match[0] == GUARD else GUARD + match[0], text)
        return [original.get(token, token) for token in encoder.encode(marked, add_special_tokens=False).ids]

    @cached_property
    def _strict(self) -> tuple[Any, dict[int, int]]:
        """A tokenizer that knows the special tokens only with a guard before them, and its added ids → the original's.

        It has the original's model and steps, so all other text, also beside special tokens, is tokenised as there.
        """
        from tokenizers import AddedToken, Tokenizer

        encoder = Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            encoder.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            encoder.pre_tokenizer = self._backend.pre_tokenizer
        special, original = {*self.tokens}, dict[Any, int]()
        for number, token in sorted(self._backend.get_added_tokens_decoder().items()):
            name = GUARD + token.content if token.content in special else token.content
            kinds = ("single_word", "lstrip", "rstrip", "normalized", "special")
            encoder.add_tokens([AddedToken(name, **{kind: getattr(token, kind) for kind in kinds})])
            original[encoder.token_to_id(name)] = number
        return encoder, original

    @cached_property
    def _inseparable(self) -> set[str]:
        """Texts without ids different from the mark's: the given words, and tokens that the tokenizer's model itself
        spells."""
        if self._backend is None:
            return {*self.tokens, *self._words}
        numbers = self.tokenizer.convert_tokens_to_ids
        return self._words | {
            token for token in self.tokens if numbers(token) in self.encode(f"{token[0]}{GUARD}{token[1:]}")
        }


def _any_of(texts: Collection[str]) -> str:
    """A pattern that matches the longest of these texts; without texts, it matches nothing."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


def decoder_of(tokenizer: Any) -> Callable[..., str]:
    """`tokenizer.decode` for lists of ids, with `skip_special_tokens` given.

    transformers examines every id before, which takes longer than decoding; if it does nothing else, the tokenizers
    library is called directly.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind, backend = type(tokenizer), getattr(tokenizer, "backend_tokenizer", None)
    usual = getattr(kind, "decode", None) is PreTrainedTokenizerBase.decode
    usual &= getattr(kind, "_decode", None) is PreTrainedTokenizerFast._decode
    return backend.decode if backend and usual and not tokenizer.clean_up_tokenization_spaces else tokenizer.decode


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


class TokenPieces:
    """What each token adds to a text; every token is looked up once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._texts: dict[int, str] = {}

    @cached_property
    def _before(self) -> tuple[list[int], str]:
        """Ids to put before a token, and their text: SentencePiece decoders strip the space a text begins with."""
        ids = self.tokenizer.encode("a", add_special_tokens=False)[-1:]
        return ids, self._decode(ids)

    def text(self, token: int) -> str:
        """The token's text in the middle of a text; U+FFFD for parts of characters."""
        if token not in self._texts:
            ids, before = self._before
            text = self._decode([*ids, token])
            self._texts[token] = text[len(before) :] if text.startswith(before) else self._decode([token])
        return self._texts[token]

    def raw(self, token: int) -> bytes:
        """The token's bytes, even if they are only part of a character."""
        text = self.text(token)
        if "�" in text:
            name = self.tokenizer.convert_ids_to_tokens(token) or ""
            if byte := _BYTE.fullmatch(name):
                return bytes([int(byte[1], 16)])
            if name and all(c in byte_alphabet() for c in name):
                return bytes(byte_alphabet()[c] for c in name)
        return text.encode()
