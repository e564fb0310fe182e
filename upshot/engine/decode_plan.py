"""Plans split-K decode attention: which program reads which part of the KV cache, for which rows. No tensors.

cuda/slots.py makes a plan when the rows of the decode batch change, and kernels/decode.py executes it. Rows form a tree
by the pages they share (a prompt, its replies, the futures of each reply). Every shared stretch is read once for all
its rows, and the rest of a row for that row alone. Long stretches are cut into *pieces*, so that few rows with long
contexts keep the whole GPU busy. Each piece gives each of its rows a partial result, a *part*; a row's parts are merged
at the end. A plan stays valid while its rows grow, because a row's last piece reaches to the row's current end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from upshot.engine.sequence import Sequence, shared_stretches

LEVELS = 3
"""Shared stretches of a row at most: what all prompts begin with, a prompt, a reply."""
OPEN = 1 << 30
"""The end of a row's last piece: a position behind every context, since the kernel stops at the row's length."""
GRAIN = 64
"""Pieces are multiples of this many ids, and of a page."""
LONG = 256
"""Rows are cut only if one exceeds its fair share of the GPU by this many ids, as merging costs kernel launches."""
PLAN_STEPS = 256
"""Decode steps for which a plan is used; then it is made anew, because rows have become longer."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How many rows one program serves on this GPU, and how many programs fill it (see kernels/decode.tiles_for)."""

    narrow: int
    """Rows of the smallest tile, which one warp computes."""
    wide: int
    """Rows of the large tile; 0: this model has none."""
    fill: tuple[int, int]
    """Narrow and wide pieces that run at once."""
    many: int
    """A stretch of at least this many rows is read faster with large tiles than with several small ones."""

    def rooms(self, rows: int) -> tuple[int, int, int]:
        """Upper bounds on narrow pieces, wide pieces and parts of a step with that many rows: the sizes of the tables
        and buffers of its CUDA graph."""
        shared, wide = self.shared(rows)
        parts = (1 + LEVELS) * rows + self.narrow * self.fill[0] + self.wide * self.fill[1]
        return rows + shared + self.fill[0], (wide + self.fill[1]) if self.wide else 0, parts

    def shared(self, rows: int) -> tuple[int, int]:
        """Shared narrow and wide tiles at most, for that many rows."""
        return rows, -(-rows // 4)


@dataclass(frozen=True, slots=True)
class Reads:
    """A plan as int32 tables."""

    narrow: np.ndarray
    """[pieces, 3 + rows of a tile]: first position, end, number of this part within each row, the rows (-1: unused)."""
    wide: np.ndarray
    """The same for large tiles."""
    parts: np.ndarray
    """[rows, 2]: index of each row's first part in the buffer of parts, and how many it has."""


def plan_reads(rows: list[Sequence], page_size: int, tiles: DecodeTiles) -> Reads | None:
    """The plan for these rows; None if it is best to read each row whole and by itself."""
    room = list(tiles.shared(len(rows)))

    def kind_of(count: int) -> tuple[int, int]:
        """For a stretch with this many rows: 1 for wide or 0 for narrow tiles, and how many tiles."""
        wide = tiles.wide > 0 and count >= tiles.many
        return int(wide), -(-count // (tiles.wide if wide else tiles.narrow))

    def takes(count: int) -> bool:
        kind, chunks = kind_of(count)
        # A CUDA graph has tables of fixed size. After the first stretch that does not fit, no more are shared by tiles
        # of this kind; each row reads them itself.
        room[kind] -= chunks if chunks <= room[kind] else 1 << 30
        return room[kind] >= 0

    stretches = shared_stretches(rows, page_size, levels=LEVELS, takes=takes)
    lengths = np.fromiter((max(s.length - 1, 1) for s in rows), np.int64, len(rows))  # its newest id has no key yet
    if not stretches and lengths.max() <= LONG + 2 * lengths.sum() / tiles.fill[0]:
        return None
    # Plain lists first: rows may change at every step, and NumPy is slow for a few numbers.
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
        # Each row numbers its parts by position: those of shared stretches, then its own.
        times = pieces.cut(length)[1]
        for row in stretch.rows:
            counted[row] += times
    counts = np.array(counted)
    alone = np.stack([starts, lengths - starts, counts, np.full_like(starts, OPEN)], 1)
    counts += narrow.cut(lengths - starts)[1]
    of_parts = np.where(counts > 1, counts, 0)  # a single part is written to the output directly
    begins = np.cumsum(of_parts) - of_parts
    tables = narrow.table(tiles.narrow, alone), wide.table(tiles.wide, alone[:0])
    return Reads(*tables, np.stack([begins, counts], 1).astype(np.int32))


class _Pieces:
    """The stretches read with tiles of one size, `total` ids in all, cut into about `fill` pieces."""

    def __init__(self, total: int, fill: int, grain: int) -> None:
        self.grain = grain
        self.most = max(1, -(-total // (fill * grain))) * grain
        self.ranges: list[tuple[int, ...]] = []
        """Per tile of a stretch: start, length, number of its first part within each row, end."""
        self.members: list[list[int]] = []
        """Per tile: its rows."""

    def cut(self, lengths: Any) -> tuple[Any, Any]:
        """The length of the pieces of a stretch, and how many there are; also for an array of lengths."""
        grains = -(-lengths // -(-lengths // self.most)) + self.grain - 1
        each = grains // self.grain * self.grain
        return each, -(-lengths // each)

    def table(self, width: int, alone: np.ndarray) -> np.ndarray:
        """The pieces of the shared stretches and of each row's unshared rest, longest first so that none ends late.

        `alone` [rows, 4]: start, length, number of the first part, end of that rest.
        """
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
        # A row's last piece has no end: sort it by its present length.
        order = np.argsort(lo - np.minimum(hi, (start + length)[of]), kind="stable")
        return np.concatenate([np.stack([lo, hi, part[of] + number], 1), rows[of]], 1).astype(np.int32)[order]
