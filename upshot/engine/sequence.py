"""A sequence is one continuation while it is sampled: its ids, its pages, its sampling rules and when it ends.

Sequences that are extended together are the rows of a decode step. Nearly every step extends the same rows by one id,
and a row needs a look only where a page begins or its last id comes. So the rows are one list, the same object while
nothing changes, and a calendar says who needs a look at which step. By their pages the rows are a tree: a prompt, its
replies, the futures of each reply. Every stretch of that tree can be read once for all rows that share it. No tensors.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix
from typing import Any, Protocol

import numpy as np

from upshot.engine.pages import ROOT

MIN_SHARED_PAGES = 4
"""Shorter stretches are read by each row: a part more to merge would cost as much."""


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
    """The decode step in which it needs a look (`DecodeRows`)."""
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
    _packed: array[int] = field(default_factory=partial(array, "i"))

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.ids)
        self.max_length = self.prompt_len + self.rules.max_tokens

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


class DecodeRows:
    """Who is extended step by step; `Sequence.due` is the step of its next look, -1 while it is not among the rows."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.step = 0
        self._rows: list[Sequence] = []
        self._joined: dict[Sequence, None] = {}
        """Running, but not among the rows yet."""
        self._left: set[Sequence] = set()
        self._calendar: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        """Entries of all kinds."""
        return len(self._rows) + len(self._joined) + len(self._left) + sum(map(len, self._calendar.values()))

    def join(self, seq: Sequence) -> None:
        """A sequence is to be extended from the next step on."""
        self._joined[seq] = None

    def leave(self, seq: Sequence) -> None:
        """A sequence is not to be extended any more."""
        if seq.due >= 0:
            seq.due = -1
            self._left.add(seq)
        self._joined.pop(seq, None)

    def look_next(self, seq: Sequence) -> None:
        """Something happened to a row's pages: look at it in the next step."""
        if 0 <= seq.due != self.step + 1:
            seq.due = self.step + 1
            self._calendar.setdefault(seq.due, []).append(seq)

    def turn(self) -> list[Sequence]:
        """Begin a step: the sequences that need a look in it."""
        self.step += 1
        due = [seq for seq in self._calendar.pop(self.step, ()) if seq.due == self.step]
        due.extend(self._joined)
        return due

    def schedule_look(self, seq: Sequence) -> None:
        """The sequence takes part in this step; enter when to look again: where a page begins, or after its last id."""
        size = self.page_size
        length = seq.length
        seq.due = self.step + min(size - (length - 1) % size, seq.max_length - length)
        self._calendar.setdefault(seq.due, []).append(seq)

    def current(self) -> list[Sequence]:
        """The rows of this step: the same list object as in the last step if no sequence joined or left."""
        if self._left or self._joined:
            left = self._left
            self._rows = [seq for seq in self._rows if seq not in left] if left else self._rows[:]
            self._rows += [seq for seq in self._joined if seq.due >= 0]
            self._joined.clear()
            self._left = set()
        return self._rows

    def reset(self, rows: list[Sequence], running: Iterable[Sequence]) -> None:
        """Start again: these rows take part in this step, no others of the running ones."""
        for seq in running:
            seq.due = -1
        self._rows = rows
        self._joined.clear()
        self._left.clear()
        self._calendar.clear()
        for seq in rows:
            self.schedule_look(seq)


@dataclass(slots=True)
class Stretch:
    """Ids start:stop of some rows, in pages that they share."""

    rows: list[int]
    start: int
    stop: int


def shared_stretches(
    rows: list[Sequence],
    page_size: int,
    skip: int = 0,
    levels: int = 1 << 30,
    takes: Callable[[int], bool] = lambda rows: True,
) -> list[Stretch]:
    """What several rows share, what more of them share first; a row's stretches follow one another.

    `skip`: this many first pages do not count. `takes`: whether a stretch of so many rows may be shared.
    """
    stretches: list[Stretch] = []
    todo = [(list(range(len(rows))), skip, skip, levels)]
    while todo:
        members, start, at, left = todo.pop()
        families: dict[int, list[int]] = {}
        for row in members:
            pages = rows[row].pages
            if at < len(pages) - 1:  # a row's last page is its own
                families.setdefault(pages[at], []).append(row)
        for family in families.values():
            if len(family) > 1:
                # Of lists of pages, not of paths.
                end = at + len(commonprefix([rows[row].pages[at:-1] for row in family]))  # noqa: RUF071
                long = end - start >= MIN_SHARED_PAGES and takes(len(family))
                if long:
                    stretches.append(Stretch(family, start * page_size, end * page_size))
                if left > long:
                    todo.append((family, end if long else start, end, left - long))
    return stretches
