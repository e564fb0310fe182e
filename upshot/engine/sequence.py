"""One continuation while it is sampled: its ids, its pages, its sampling rules and when it ends."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from upshot.engine.pages import ROOT


class Grammar(Protocol):
    """What decides which tokens may come next (a JSON schema, say)."""

    def allowed(self) -> np.ndarray:
        """Bit mask of the vocabulary, uint32 words, least significant bit first."""
        ...

    def accept(self, token: int) -> bool:
        """Take the sampled token; True when the text is complete."""
        ...

    def copy(self) -> Grammar:
        """The same state once more, for a fork."""
        ...


@dataclass(frozen=True, slots=True)
class Rules:
    """How one sequence is sampled and when it ends, in the engine's terms (ids, no text)."""

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Any of these ends the sequence and stays its last id."""
    top_logprobs: int = 0
    stopped: Callable[[list[int]], bool] | None = None
    """Called with the sampled ids after each one; True ends the sequence (stop strings)."""

    @property
    def cuts(self) -> bool:
        """Whether the distribution is cut before sampling."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    def of_row(self, max_tokens: int, seed: int, stop_ids: frozenset[int]) -> Rules:
        """The rules of one continuation (`dataclasses.replace` takes twice the time)."""
        cuts = (self.temperature, self.top_p, self.top_k, self.min_p)
        return Rules(max_tokens, *cuts, seed, stop_ids, self.top_logprobs, self.stopped)


WAITING, RUNNING, DONE = 0, 1, 2
Top = tuple[tuple[int, float], ...]
"""The likeliest ids in one place, with their log-probabilities."""


def likeliest(ids: list[int], logprobs: list[float], most: int) -> Top:
    """The first `most` of these ids; none that a grammar forbids."""
    return tuple((i, p) for i, p in zip(ids[:most], logprobs, strict=False) if p > -math.inf)


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation. `length` counts the ids known to the host plus those still being computed (`pending`)."""

    ids: list[int]
    """Prompt and sampled ids."""
    rules: Rules
    prompt_len: int = 0
    given: bool = False
    """The ids after the prompt are given, not sampled: only their log-probabilities are wanted."""
    grammar: Grammar | None = None
    on_token: Callable[[Sequence, int, float], None] | None = None
    on_done: Callable[[Sequence], None] | None = None
    siblings: dict[Sequence, None] = field(default_factory=dict)
    """Sequences that fork off the first of them when their prompt has been read: one dictionary for all of them."""
    forks: int = 0
    """How many were forked off since."""
    state: int = WAITING
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """While the prompt is read: ids whose keys and values are in the pages (or will be, by work already queued)."""
    pending: int = 0
    due: int = -1
    """The decode step in which it needs a look (decode_rows.py)."""
    check: int = 0
    """Its next id needs more than appending once there are this many."""
    published: int = 0
    """Pages offered to the prefix cache."""
    chain: int = ROOT
    slot: int = -1
    logprobs: list[float] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    finish: str = ""
    """stop, length, abort or error; empty while it is running."""
    error: BaseException | None = None
    version: int = -1
    """Version of the weights that sampled its first id."""
    cached: int = 0
    """Prompt ids whose keys and values were found in the prefix cache."""
    tag: Any = None
    max_length: int = field(init=False)
    """Length at which it is cut."""
    _packed: array[int] = field(default_factory=lambda: array("i"))

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.ids)
        self.max_length = self.prompt_len + self.rules.max_tokens

    @property
    def reads(self) -> int:
        """Ids to be read before it samples or is done: the last given id need not be read."""
        return len(self.ids) - self.given

    @property
    def spared(self) -> int:
        """Ids that need not be read if their keys and values are cached: those whose logits are not needed."""
        return (self.prompt_len if self.given else len(self.ids)) - 1

    @property
    def length(self) -> int:
        """Ids known plus ids in the making."""
        return len(self.ids) + self.pending

    def packed(self) -> array[int]:
        """All ids as machine integers (kept, so that each is converted once)."""
        packed, ids = self._packed, self.ids
        fresh = len(ids) - len(packed)
        if fresh > 32:  # twice as fast as one by one
            packed.frombytes(struct.pack(f"{fresh}i", *ids[-fresh:]))
        elif fresh:
            packed.fromlist(ids[-fresh:])
        return packed

    @property
    def sampled(self) -> list[int]:
        """The sampled (or given) ids."""
        return self.ids[self.prompt_len :]


Scored = tuple[Sequence, list[float], list[Top]]
"""Log-probabilities of a sequence's next given ids, and the likeliest ids in their places."""
