"""How sequences are laid out as flat tokens: end to end, or as a tree in which shared beginnings occur once.

A token's hidden state depends only on the tokens before it. So sequences that begin alike (the replies to one prompt,
the turns of one conversation) can share the segment they begin with, whether it is trained or not: each reads its rows
from it, and their gradients add up there. Whole blocks of tokens are shared, so that no segment is tiny.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

BLOCK = 16
"""Beginnings are shared in multiples of this many tokens."""
COPY = 1 / 16
"""The cost of copying a key next to others for a reply, in units of the cost of a token: some ten thousand bytes
against millions of multiplications per layer."""

Ids = np.ndarray
"""Token ids of a sequence, int32."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of flat tokens; it attends to itself and to the segments it continues."""

    start: int
    """Its first flat token."""
    length: int
    parent: int = -1
    """The segment that it continues; -1: it begins a sequence."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of sequences are."""

    segments: tuple[Segment, ...]
    """Parents stand before their children; together they are all flat tokens, in order."""
    paths: tuple[tuple[int, ...], ...]
    """The segments of each sequence."""

    @property
    def tokens(self) -> int:
        """How many flat tokens there are."""
        return self.segments[-1].start + self.segments[-1].length if self.segments else 0

    @property
    def shares(self) -> bool:
        """Whether any segment continues another."""
        return any(segment.parent >= 0 for segment in self.segments)

    def lines(self) -> list[tuple[int, ...]]:
        """For each segment: itself and those it continues, the first of them first."""
        lines: list[tuple[int, ...]] = []
        for index, segment in enumerate(self.segments):
            lines.append((*(lines[segment.parent] if segment.parent >= 0 else ()), index))
        return lines

    def places(self, line: Sequence[int]) -> np.ndarray:
        """The flat tokens of some segments, in order."""
        runs = [np.arange(s.start, s.start + s.length) for s in (self.segments[i] for i in line)]
        return np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)


def end_to_end(lengths: Sequence[int]) -> Layout:
    """One segment a sequence."""
    starts = np.cumsum([0, *lengths]).tolist()
    segments = tuple(Segment(start, length) for start, length in zip(starts, lengths, strict=False))
    return Layout(segments, tuple((i,) for i in range(len(segments))))


def tree(sequences: Sequence[Ids], block: int = BLOCK) -> Layout:
    """A layout in which a beginning that sequences have in common is one segment."""
    order = sorted(range(len(sequences)), key=lambda i: prefix_key(sequences[i]))
    common = [0, *(common_prefix(sequences[a], sequences[b], block) for a, b in pairwise(order))]
    segments: list[Segment] = []
    paths: list[tuple[int, ...]] = [()] * len(sequences)

    # Sequences order[first:stop], which begin with the `depth` tokens of `path`; the next ones on top.
    todo: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(sequences), 0, ())] if sequences else []
    while todo:
        first, stop, depth, path = todo.pop()
        only = stop - first == 1
        until = len(sequences[order[first]]) if only else min(common[first + 1 : stop])
        if until > depth:
            start = segments[-1].start + segments[-1].length if segments else 0
            segments.append(Segment(start, until - depth, path[-1] if path else -1))
            path = (*path, len(segments) - 1)
        if only:
            paths[order[first]] = path
            continue
        cuts = [first, *(i for i in range(first + 1, stop) if common[i] == until), stop]
        todo += [(a, b, until, path) for a, b in reversed(list(pairwise(cuts)))]
    return Layout(tuple(segments), tuple(paths))


def common_prefix(a: Ids, b: Ids, block: int = BLOCK) -> int:
    """How many tokens two sequences begin with in common, in whole blocks."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return (int(different[0]) if len(different) else size) // block * block


def shared_tokens(sequences: Sequence[Ids]) -> int:
    """How many tokens sequences have if a common beginning counts once."""
    ordered = sorted(sequences, key=prefix_key)  # no other sequence shares more with one than its neighbour does
    return sum(map(len, ordered)) - sum(common_prefix(a, b) for a, b in pairwise(ordered))


def prefix_key(ids: Ids) -> bytes:
    """Sorted by this, sequences that begin alike are neighbours."""
    return ids.astype(">i4").tobytes()


def worth_sharing(sequences: Sequence[Ids]) -> bool:
    """Whether a tree saves more tokens than it costs in keys that must be copied side by side for attention."""
    layout = tree(sequences)
    saved = sum(map(len, sequences)) - layout.tokens
    keys = sum(sum(layout.segments[i].length for i in line) for line in layout.lines())
    return saved > COPY * keys
