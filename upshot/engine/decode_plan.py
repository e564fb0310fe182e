"""What the attention of a decode step reads, and for whom. No tensors.

The rows are a tree by their pages: a prompt, its replies, the futures of each reply. Every stretch of that tree is read
once for all rows that share it, and what is a row's alone for that row. Long stretches are cut into pieces, so that few
rows with long contexts keep the whole GPU busy. What a row finds in its pieces are its *parts*, merged in the end
(kernels/decode.py). A plan stays right while its rows grow: a row's last piece reaches to wherever the row ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from upshot.engine.sequence import Sequence, shared_stretches

LEVELS = 3
"""Stretches that a row may share: what all prompts begin with, a prompt, a reply."""
OPEN = 1 << 30
"""The end of a row's last piece."""
GRAIN = 64
"""Pieces are multiples of this many ids (and of a page)."""
LONG = 256
"""Ids beyond its fair share of the GPU from which a row is cut: with parts a layer has three kernels instead of one."""
HOLDS = 256
"""Steps after which a plan is made anew."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """What programs on this GPU serve: rows at most, and how many pieces keep it busy."""

    narrow: int
    """Rows whose heads fit in the least tile, which one warp computes."""
    wide: int
    """Rows of a large tile; 0: too large a tile for this model."""
    fill: tuple[int, int]
    """Narrow and wide pieces that are under way at once."""
    many: int
    """Rows of a stretch from which a large tile is faster than several of the least."""

    def rooms(self, rows: int) -> tuple[int, int, int]:
        """Most narrow pieces, wide pieces and parts of a step of that many rows: what a captured one has room for."""
        shared, wide = self.shared(rows)
        parts = (1 + LEVELS) * rows + self.narrow * self.fill[0] + self.wide * self.fill[1]
        return rows + shared + self.fill[0], (wide + self.fill[1]) if self.wide else 0, parts

    def shared(self, rows: int) -> tuple[int, int]:
        """Most narrow and wide stretches that are shared."""
        return rows, -(-rows // 4)


@dataclass(frozen=True, slots=True)
class Reads:
    """A plan, as the kernels read it."""

    narrow: np.ndarray
    """[pieces, 3 + rows of a tile] First id, end, place among the parts of each of its rows, the rows (-1: none)."""
    wide: np.ndarray
    parts: np.ndarray
    """[rows, 2] Each row's first part, and how many it has."""


def plan_reads(rows: list[Sequence], page_size: int, tiles: DecodeTiles) -> Reads | None:
    """The plan for these rows; None where each is best read whole, by itself."""
    room = list(tiles.shared(len(rows)))

    def kind_of(count: int) -> tuple[int, int]:
        """Whether a stretch with this many rows is read with wide tiles, and how many tiles that takes."""
        wide = tiles.wide > 0 and count >= tiles.many
        return int(wide), -(-count // (tiles.wide if wide else tiles.narrow))

    def takes(count: int) -> bool:
        kind, chunks = kind_of(count)
        # A captured step has room for a fixed number of pieces. The first stretch that finds none closes its kind: what
        # comes after it is read by each row itself.
        room[kind] -= chunks if chunks <= room[kind] else 1 << 30
        return room[kind] >= 0

    stretches = shared_stretches(rows, page_size, levels=LEVELS, takes=takes)
    lengths = np.fromiter((max(s.length - 1, 1) for s in rows), np.int64, len(rows))  # one id is in the making
    if not stretches and lengths.max() <= LONG + 2 * lengths.sum() / tiles.fill[0]:
        return None
    # Plain lists for now: rows may change at every step, and NumPy takes long to begin with a few numbers.
    ends, counted, totals, grain = [0] * len(rows), [0] * len(rows), [0, 0], max(GRAIN, page_size)
    for stretch in stretches:
        for row in stretch.rows:
            ends[row] = stretch.stop
        kind, chunks = kind_of(len(stretch.rows))
        totals[kind] += (stretch.stop - stretch.start) * chunks
    starts = np.array(ends)
    totals[0] += int((lengths - starts).sum())
    narrow, wide = (_Pieces(t, fill, g) for t, fill, g in zip(totals, tiles.fill, (grain, 4 * grain), strict=True))
    for stretch in stretches:
        kind, chunks = kind_of(len(stretch.rows))
        pieces, length = (narrow, wide)[kind], stretch.stop - stretch.start
        each = -(-len(stretch.rows) // chunks)
        for first in range(0, len(stretch.rows), each):
            pieces.members.append(stretch.rows[first : first + each])
            pieces.ranges.append((stretch.start, length, counted[stretch.rows[0]], stretch.stop))
        # Each row numbers its own parts, in the order in which it reads them: those of stretches, then its own.
        times = pieces.cut(length)[1]
        for row in stretch.rows:
            counted[row] += times
    counts = np.array(counted)
    alone = np.stack([starts, lengths - starts, counts, np.full_like(starts, OPEN)], 1)
    counts += narrow.cut(lengths - starts)[1]
    of_parts = np.where(counts > 1, counts, 0)  # a row's only part is its result
    begins = np.cumsum(of_parts) - of_parts
    tables = narrow.table(tiles.narrow, alone), wide.table(tiles.wide, alone[:0])
    return Reads(*tables, np.stack([begins, counts], 1).astype(np.int32))


class _Pieces:
    """Stretches that programs of one kind read, cut into about `fill` pieces."""

    def __init__(self, total: int, fill: int, grain: int) -> None:
        self.grain = grain
        self.most = max(1, -(-total // (fill * grain))) * grain
        self.ranges: list[tuple[int, ...]] = []
        """Of each stretch: its start, its length, its place among the parts of its rows, its end."""
        self.members: list[list[int]] = []

    def cut(self, lengths: Any) -> tuple[Any, Any]:
        """The length of the pieces of a stretch (or of each of an array), and how many they are."""
        grains = -(-lengths // -(-lengths // self.most)) + self.grain - 1
        each = grains // self.grain * self.grain
        return each, -(-lengths // each)

    def table(self, width: int, alone: np.ndarray) -> np.ndarray:
        """The pieces of the stretches and of what is each row's `alone`; the longest first, for they take longest."""
        shared = [members + [-1] * (width - len(members)) for members in self.members]
        rows = np.full((len(shared) + len(alone), width), -1)
        rows[: len(shared)] = np.array(shared, dtype=np.int64).reshape(len(shared), width)
        rows[len(shared) :, :1] = np.arange(len(alone))[:, None]
        start, length, part, stop = np.concatenate([np.array(self.ranges, dtype=np.int64).reshape(-1, 4), alone]).T
        each, times = self.cut(length)
        of, number = np.repeat(np.arange(len(start)), times), np.arange(times.sum())
        number -= np.repeat(np.cumsum(times) - times, times)
        lo = start[of] + number * each[of]
        hi = np.where(number == times[of] - 1, stop[of], lo + each[of])
        # A row's last piece is open: for its place in the order its length now counts.
        order = np.argsort(lo - np.minimum(hi, (start + length)[of]), kind="stable")
        return np.concatenate([np.stack([lo, hi, part[of] + number], 1), rows[of]], 1).astype(np.int32)[order]
