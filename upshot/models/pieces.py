"""The text and the bytes of single tokens, as log-probabilities name them."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others for 256 and what follows."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(rest)}


_ALPHABET = byte_alphabet()


class Pieces:
    """What one token adds to a text; looked up once each."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    @cached_property
    def _before(self) -> tuple[list[int], str]:
        """Ids to put before a token, and their text: SentencePiece decoders strip the space a text begins with."""
        ids = self.tokenizer.encode("a", add_special_tokens=False)[-1:]
        return ids, self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text(self, token: int) -> str:
        """The token's text in the middle of a text; U+FFFD for parts of characters."""
        if token not in self._texts:
            ids, before = self._before
            text = self._decode([*ids, token])
            self._texts[token] = text[len(before) :] if text.startswith(before) else self._decode([token])
        return self._texts[token]

    def raw(self, token: int) -> bytes:
        """The token's bytes, also where they are part of a character only."""
        text = self.text(token)
        if "�" in text:
            name = self.tokenizer.convert_ids_to_tokens(token) or ""
            if byte := _BYTE.fullmatch(name):
                return bytes([int(byte[1], 16)])
            if name and all(c in _ALPHABET for c in name):
                return bytes(_ALPHABET[c] for c in name)
        return text.encode()
