"""A `Sequence` is one continuation while it is sampled: ids, pages, sampling rules, state. No tensors.

The scheduler owns sequences, and the runners read them. `DecodeRows` keeps the rows of the decode batch for the
scheduler: nearly every decode step extends the same rows by one id, and a row has to be checked only where it needs a
new page or reaches its last id. So the rows are one list, the same object while nothing changes, and a calendar says
which rows to check in which step. `shared_stretches` finds the prefixes that rows share by their page lists, which form
a tree (a prompt, its replies, the futures of each reply), so that attention can read every shared part once.
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
"""Shorter shared stretches are not split off: merging one more partial result would cost as much as it saves."""


class Grammar(Protocol):
    """Decides which ids may come next, for example by a JSON schema; one object per sequence."""

    def allowed(self) -> np.ndarray:
        """Bit mask of the vocabulary, uint32 words, least significant bit first."""
        ...

    def accept(self, token: int) -> bool:
        """Take the sampled token; True when the text is complete."""
        ...

    def copy(self) -> Grammar:
        """An independent copy of the state, for a fork."""
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
        """Whether top-k, top-p or min-p cut the distribution before sampling."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    def of_row(self, max_tokens: int, seed: int, stop_ids: frozenset[int]) -> Rules:
        """The rules of one continuation of a request (twice as fast as `dataclasses.replace`)."""
        cuts = (self.temperature, self.top_p, self.top_k, self.min_p)
        return Rules(max_tokens, *cuts, seed, stop_ids, self.top_logprobs, self.stopped)


WAITING, RUNNING, DONE = 0, 1, 2
Top = tuple[tuple[int, float], ...]
"""The likeliest ids at one position with their log-probabilities."""


def likeliest(ids: list[int], logprobs: list[float], most: int) -> Top:
    """The first `most` of these ids, without those that a grammar forbids (log-probability -inf)."""
    return tuple((i, p) for i, p in zip(ids[:most], logprobs, strict=False) if p > -math.inf)


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a prompt, or ids to score (`given`)."""

    ids: list[int]
    """Prompt and sampled ids."""
    rules: Rules
    prompt_len: int = 0
    given: bool = False
    """The ids after the prompt are given and only scored; nothing is sampled."""
    grammar: Grammar | None = None
    on_token: Callable[[Sequence, int, float], None] | None = None
    on_done: Callable[[Sequence], None] | None = None
    siblings: dict[Sequence, None] = field(default_factory=dict)
    """Other continuations of the same prompt, which share its pages once it is prefilled; one dictionary for all."""
    forks: int = 0
    """How many forks of this sequence were made (`Engine.fork`)."""
    state: int = WAITING
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """During prefill: ids whose keys and values are in the pages, or will be by steps already launched."""
    pending: int = 0
    """Ids that are being sampled and that the host does not know yet."""
    due: int = -1
    """The decode step in which `DecodeRows` checks it next; -1: it is not among the rows."""
    check: int = 0
    """The number of ids from which on `Scheduler.commit` must do more than append."""
    published: int = 0
    """Pages entered into the prefix cache."""
    chain: int = ROOT
    """The prefix that these pages hold, as `PagePool` names it."""
    slot: int = -1
    """Its index into device state; -1: none."""
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
    """Free for the caller."""
    max_length: int = field(init=False)
    """Prompt and sampled ids at most."""
    _packed: array[int] = field(default_factory=partial(array, "i"))

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.ids)
        self.max_length = self.prompt_len + self.rules.max_tokens

    @property
    def length(self) -> int:
        """Ids known to the host plus ids being sampled."""
        return len(self.ids) + self.pending

    def packed(self) -> array[int]:
        """All ids as 32-bit integers; kept, so that each id is converted once."""
        packed, ids = self._packed, self.ids
        fresh = len(ids) - len(packed)
        if fresh > 32:  # twice as fast as fromlist
            packed.frombytes(struct.pack(f"{fresh}i", *ids[-fresh:]))
        elif fresh:
            packed.fromlist(ids[-fresh:])
        return packed

    @property
    def sampled(self) -> list[int]:
        """The sampled (or given) ids."""
        return self.ids[self.prompt_len :]


Scored = tuple[Sequence, list[float], list[Top]]
"""A sequence, log-probabilities of its next given ids, and the likeliest ids at their positions."""


class DecodeRows:
    """The rows of the decode batch, and a calendar of when each of them must be checked (see the module)."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.step = 0
        self._rows: list[Sequence] = []
        self._joined: dict[Sequence, None] = {}
        """Prefilled since the last step."""
        self._left: set[Sequence] = set()
        """Ended or preempted since the last step."""
        self._calendar: dict[int, list[Sequence]] = {}
        """Step → rows to check; an entry counts only while it agrees with `Sequence.due`."""

    def __len__(self) -> int:
        """Entries of all kinds (tests check that they do not pile up)."""
        return len(self._rows) + len(self._joined) + len(self._left) + sum(map(len, self._calendar.values()))

    def join(self, seq: Sequence) -> None:
        """A sequence decodes from the next step on."""
        self._joined[seq] = None

    def leave(self, seq: Sequence) -> None:
        """A sequence decodes no more."""
        if seq.due >= 0:
            seq.due = -1
            self._left.add(seq)
        self._joined.pop(seq, None)

    def check_next(self, seq: Sequence) -> None:
        """The last page of a row has become shared: check the row in the next step."""
        if 0 <= seq.due != self.step + 1:
            seq.due = self.step + 1
            self._calendar.setdefault(seq.due, []).append(seq)

    def begin_step(self) -> list[Sequence]:
        """Begin a step; returns the sequences to check in it, new ones included."""
        self.step += 1
        due = [seq for seq in self._calendar.pop(self.step, ()) if seq.due == self.step]
        due.extend(self._joined)
        return due

    def schedule_check(self, seq: Sequence) -> None:
        """The sequence takes part in this step: enter when to check it again, at its next page or after its last id."""
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
        """Rebuild everything: of the running sequences, exactly `rows` take part in this step."""
        for seq in running:
            seq.due = -1
        self._rows = rows
        self._joined.clear()
        self._left.clear()
        self._calendar.clear()
        for seq in rows:
            self.schedule_check(seq)


@dataclass(slots=True)
class Stretch:
    """Positions start:stop of some rows (indices into the batch), in pages that all of them share."""

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
    """The prefixes that several rows share, outermost first; a row's stretches are adjacent, from `skip` pages on.

    `levels`: the most stretches of a row. `takes`: asked for every stretch, by its number of rows, whether to share it.
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
                # This works on any lists, not only on paths.
                end = at + len(commonprefix([rows[row].pages[at:-1] for row in family]))  # noqa: RUF071
                long = end - start >= MIN_SHARED_PAGES and takes(len(family))
                if long:
                    stretches.append(Stretch(family, start * page_size, end * page_size))
                if left > long:
                    todo.append((family, end if long else start, end, left - long))
    return stretches
