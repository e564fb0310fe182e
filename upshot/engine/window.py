"""Dense keys and values of the sequences being extended, so that a step copies nothing but the new token.

Each row holds one sequence. Rows that share their first pages hold only what comes after them; the shared part is held
once and read once for all of them. Bounded by `limit_bytes`: beyond that a step gathers from the pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from upshot.engine.sequence import Sequence
from upshot.engine.sharing import find_shared
from upshot.engine.store import Store


@dataclass(slots=True, eq=False)
class Prefix:
    """First pages that several rows share, dense: [layers, kv_heads, length, dim]."""

    pages: list[int]
    length: int
    k: torch.Tensor
    v: torch.Tensor


@dataclass(slots=True)
class Row:
    """A sequence in the window; `start` is where its own part begins."""

    seq: Sequence
    pages: list[int]
    """The list its content came from: a sequence that was admitted anew has another."""
    start: int
    prefix: Prefix | None


class Window:
    """[layers, rows, kv_heads, length, dim] for keys and values."""

    def __init__(self, store: Store, limit_bytes: int, share: bool) -> None:
        self.store, self.limit, self.share = store, limit_bytes, share
        self.k = store.k.new_empty(0)
        self.v = store.v.new_empty(0)
        self.rows: list[Row] = []
        self._prefixes: dict[int, Prefix] = {}
        self._shape = (0, 0)
        self.changes = 0
        """Counts changes of the rows."""

    def clear(self) -> None:
        """Forget all rows."""
        self.rows, self._prefixes = [], {}
        self.changes += 1

    def admit(self, wanted: list[Sequence]) -> bool:
        """Make the rows exactly `wanted`, in any order, filled up to each one's last id; False if that is too large."""
        keep = {id(seq.pages) for seq in wanted}
        self._compact(keep)
        here = {id(row.pages) for row in self.rows}
        fresh = self._placed([seq for seq in wanted if id(seq.pages) not in here])
        longest = max(len(row.seq.ids) - row.start for row in [*self.rows, *fresh])
        if not self._grow(len(wanted), longest):
            self.clear()
            return False
        if fresh:
            self._fill(fresh)
        return True

    def _placed(self, seqs: list[Sequence]) -> list[Row]:
        """Rows for new sequences, with the prefixes they share."""
        rows = [Row(seq, seq.pages, 0, None) for seq in seqs]
        if not self.share or not rows:
            return rows
        alone: list[Row] = []
        for row in rows:
            known = self._prefixes.get(row.pages[0])
            if known is not None and row.pages[: len(known.pages)] == known.pages and len(row.seq.ids) > known.length:
                row.prefix, row.start = known, known.length
            else:
                alone.append(row)
        for leader, length, members in find_shared([row.seq for row in alone], self.store.page_size, 1 << 30)[0]:
            seq = alone[leader].seq
            cells = torch.from_numpy(self.store.cells(seq, 0, length))
            pages = seq.pages[: length // self.store.page_size]
            dense = [cache[:, cells].transpose(1, 2).contiguous() for cache in (self.store.k, self.store.v)]
            prefix = self._prefixes[pages[0]] = Prefix(pages, length, *dense)
            for member in members:
                alone[member].prefix, alone[member].start = prefix, length
        return rows

    def _compact(self, keep: set[int]) -> None:
        rows = self.rows
        index = 0
        before = len(rows)
        while index < len(rows):
            if id(rows[index].pages) in keep:
                index += 1
                continue
            last = rows.pop()
            if index < len(rows):
                n = len(last.seq.ids) - last.start
                self.k[:, index, :, :n] = self.k[:, len(rows), :, :n]
                self.v[:, index, :, :n] = self.v[:, len(rows), :, :n]
                rows[index] = last
        if len(rows) != before:
            self.changes += 1
            used = {id(row.prefix) for row in rows}
            self._prefixes = {page: prefix for page, prefix in self._prefixes.items() if id(prefix) in used}

    def _fill(self, fresh: list[Row]) -> None:
        first = len(self.rows)
        lengths = [len(row.seq.ids) - 1 - row.start for row in fresh]
        longest = max(lengths)
        cells = np.zeros((len(fresh), longest), dtype=np.int64)
        for at, (row, n) in enumerate(zip(fresh, lengths, strict=True)):
            cells[at, :n] = self.store.cells(row.seq, row.start, row.start + n)
        index = torch.from_numpy(cells)
        stop = first + len(fresh)
        for dense, paged in ((self.k, self.store.k), (self.v, self.store.v)):
            for layer in range(len(paged)):
                dense[layer, first:stop, :, :longest] = paged[layer][index].transpose(1, 2)
        self.rows.extend(fresh)
        self.changes += 1

    def _grow(self, rows: int, length: int) -> bool:
        have_rows, have_length = self._shape
        if rows <= have_rows and length <= have_length:
            return True
        rows = max(have_rows, -(-rows // 16) * 16)
        length = max(have_length, -(-(length + length // 4) // 32) * 32)
        store = self.store.k
        layers, _, heads, dim = store.shape
        if 2 * layers * rows * heads * length * dim * store.element_size() > self.limit:
            return False
        for name in ("k", "v"):
            old = getattr(self, name)
            new = store.new_zeros(layers, rows, heads, length, dim)
            if self.rows:
                new[:, : len(self.rows), :, :have_length] = old[:, : len(self.rows)]
            setattr(self, name, new)
        self._shape = (rows, length)
        return True
