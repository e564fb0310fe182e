"""Keys and values on the CPU, for cpu/runner.py: `Store` keeps them in pages, `Window` also densely during decode.

Each row of the window holds one sequence, so that a decode step copies nothing but the new tokens. Rows that share
their first pages hold only what follows; the shared part is stored and read once, as a `Prefix`, at every level (a
prompt for its replies, a reply for its futures). A step whose rows would exceed the window's limit gathers keys and
values from the pages instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from upshot.engine.kernels.plain import AttentionOptions
from upshot.engine.llama.shape import Shape
from upshot.engine.sequence import Sequence, shared_stretches
from upshot.engine.swap_slot import SwapSlot, allocate_pages

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What `scaled_dot_product_attention` runs on the CPU; it also returns each query's log-sum-exp of scores."""

Span = tuple[Sequence, int, int]
"""A sequence with positions start and stop."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions, causal: bool = False
) -> Tensor:
    """Attention of q [batch, heads, queries, dim] to k, v [batch, heads, keys, dim]; mask: which keys a query sees."""
    scale, _, softcap, sinks, _ = options
    if not softcap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=causal)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        # In a decode step the query heads of a key head are its queries, and each of them has its own sink.
        column = sinks.to(scores.dtype).view(q.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., : k.shape[-2]] @ v


class Store:
    """Keys and values in pages: one tensor each, [layers, pages × page_size, kv_heads, dim]."""

    def __init__(self, shape: Shape, n_pages: int, page_size: int, swap_slot: SwapSlot | None = None) -> None:
        self.page_size, self._dtype, self._swap_slot = page_size, shape.dtype, swap_slot
        self._size = (shape.layers, n_pages * page_size, shape.kv_heads, shape.head_dim)
        self.take()

    def take(self) -> None:
        """Allocate all pages."""
        self.k, self.v = allocate_pages(self._size, self._dtype, torch.device("cpu"), self._swap_slot)

    def release(self) -> None:
        """Release all pages, until `take`."""
        self.k, self.v = (torch.zeros(0, dtype=self._dtype) for _ in range(2))

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages (from, to) in all layers; all sources are read before any target is written."""
        source, target = (torch.tensor(x) for x in zip(*copies, strict=True))
        for cache in (self.k, self.v):
            pages = cache.view(cache.shape[0], -1, self.page_size, *cache.shape[2:])
            pages[:, target] = pages[:, source]

    def write(self, layer: int, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values [tokens, kv_heads, dim] of new tokens in their cells [tokens]."""
        self.k[layer].index_copy_(0, cells, k)
        self.v[layer].index_copy_(0, cells, v)

    def table(self, spans: list[Span], multiple: int = 1) -> Tensor:
        """The cells of these spans, one per row, padded with 0 to the longest length rounded up to a `multiple`."""
        width = -(-max([stop - start for _, start, stop in spans]) // multiple) * multiple
        cells = np.zeros((len(spans), width), dtype=np.int64)
        for row, (seq, start, stop) in enumerate(spans):
            cells[row, : stop - start] = self.cells(seq, start, stop)
        return torch.from_numpy(cells)

    def cells(self, seq: Sequence, start: int, stop: int) -> np.ndarray:
        """The cells of positions start:stop of a sequence."""
        positions = np.arange(start, stop)
        return np.asarray(seq.pages)[positions // self.page_size] * self.page_size + positions % self.page_size


@dataclass(slots=True, eq=False)
class Prefix:
    """Pages that several rows share, and a dense copy of them."""

    pages: list[int]
    skip: int
    """The number of pages before these in each row."""
    k: Tensor
    """[layers, kv_heads, length, dim]"""
    v: Tensor


@dataclass(slots=True)
class WindowRow:
    """A sequence in the window."""

    seq: Sequence
    pages: list[int]
    """The page list that its content was copied from; after a preemption the sequence has a new list object."""
    start: int = 0
    """Where its own part begins, after the prefixes."""
    prefixes: tuple[Prefix, ...] = ()


@dataclass(slots=True)
class PrefixStack:
    """Prefixes of the same length at the same level, attended to in one call."""

    prefixes: list[Prefix]
    k: Tensor
    """[layers, prefixes, kv_heads, length, dim]"""
    v: Tensor
    queries: Tensor | None
    """[prefixes × members] The rows that read each prefix, the last one repeated so that all prefixes have equally
    many; None: all rows, in their order."""
    rows: Tensor | None
    """The rows that read any of the prefixes; None: all rows."""
    back: Tensor
    """The index among `queries` of each of those rows."""


def stack_prefixes(rows: list[WindowRow], before: list[PrefixStack]) -> list[PrefixStack]:
    """Group the prefixes of these rows by level and length; tensors of `before` are reused."""
    readers: dict[int, tuple[Prefix, list[int]]] = {}
    for index, row in enumerate(rows):
        for prefix in row.prefixes:
            readers.setdefault(id(prefix), (prefix, []))[1].append(index)
    groups: dict[tuple[int, int], list[tuple[Prefix, list[int]]]] = {}
    for prefix, members in readers.values():
        # Prefixes of the same level, so no row reads two of them.
        groups.setdefault((prefix.k.shape[2], prefix.skip), []).append((prefix, members))
    known = {tuple(map(id, stack.prefixes)): (stack.k, stack.v) for stack in before}
    return [_stack(group, len(rows), known) for group in groups.values()]


def _stack(
    group: list[tuple[Prefix, list[int]]], n: int, known: dict[tuple[int, ...], tuple[Tensor, Tensor]]
) -> PrefixStack:
    most = max(len(members) for _, members in group)
    queries = [i for _, members in group for i in members + members[-1:] * (most - len(members))]
    place = {row: at for at, row in enumerate(queries)}
    rows = sorted(place)
    prefixes = [prefix for prefix, _ in group]
    k, v = known.get(tuple(map(id, prefixes))) or (
        torch.stack([prefix.k for prefix in prefixes], 1),
        torch.stack([prefix.v for prefix in prefixes], 1),
    )
    for at, prefix in enumerate(prefixes):
        prefix.k, prefix.v = k[:, at], v[:, at]  # so that memory holds one copy
    asked = None if queries == list(range(n)) else torch.tensor(queries)
    some = None if len(rows) == n else torch.tensor(rows)
    return PrefixStack(prefixes, k, v, asked, some, torch.tensor([place[row] for row in rows]))


def attend_with_prefixes(
    layer: int, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, stacks: list[PrefixStack], scale: float
) -> Tensor:
    """Attention of q [rows, kv_heads, queries, dim] to each row's own part (`keys`, `values`) and to its prefixes, each
    of which is read once for all its rows."""
    _, heads, each, dim = q.shape
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    out, mass = flash(q, keys, values, attn_mask=mask, scale=scale)
    for stack in stacks:
        prefixes = stack.k.shape[1]
        asked = q if stack.queries is None else q.index_select(0, stack.queries)
        asked = asked.reshape(prefixes, -1, heads, each, dim).transpose(1, 2).reshape(prefixes, heads, -1, dim)
        parts = flash(asked, stack.k[layer], stack.v[layer], scale=scale)
        there, high = (x.reshape(prefixes, heads, -1, each, *x.shape[3:]).transpose(1, 2).flatten(0, 1) for x in parts)
        if stack.queries is not None:
            there, high = there.index_select(0, stack.back), high.index_select(0, stack.back)
        rows: Tensor | slice = slice(None) if stack.rows is None else stack.rows
        # Merge the softmaxes over two sets of keys, weighted by their sums: the prefix gets the share
        # e^high / (e^high + e^before).
        before = mass[rows]
        share = torch.sigmoid(high - before)[..., None].to(out.dtype)
        both, total = torch.lerp(out[rows], there, share), torch.logaddexp(before, high)
        if stack.rows is None:
            out, mass = both, total
        else:
            out[rows], mass[rows] = both, total
    return out


class Window:
    """Dense keys and values of the decoding rows, `k` and `v`: [layers, rows, kv_heads, length, dim]."""

    def __init__(self, store: Store, limit_bytes: int, share: bool) -> None:
        self.store, self.limit, self.share = store, limit_bytes, share
        self.k = store.k.new_empty(0)
        self.v = store.v.new_empty(0)
        self.rows: list[WindowRow] = []
        self.stacks: list[PrefixStack] = []
        self.starts = np.zeros(0, dtype=np.int64)
        """[rows] Where each row's own part begins."""
        self._wanted: list[Sequence] | None = None
        self._longest = 0
        self._prefixes: dict[int, Prefix] = {}
        self._shape = (0, 0)

    def clear(self) -> None:
        """Forget all rows."""
        self.rows, self.stacks, self._prefixes, self._wanted = [], [], {}, None

    def admit(self, wanted: list[Sequence]) -> bool:
        """Make the rows exactly `wanted`, in any order, filled up to each one's last id; False if that is too large.

        If `wanted` is the same list object as last time, the rows are the same and each is one id longer.
        """
        if wanted is self._wanted:
            self._longest += 1
            fresh: list[WindowRow] = []
        else:
            self._compact({id(seq.pages) for seq in wanted})
            here = {id(row.pages) for row in self.rows}
            fresh = self._place([seq for seq in wanted if id(seq.pages) not in here])
            self._longest = max([len(row.seq.ids) - row.start for row in [*self.rows, *fresh]])
        if not self._grow(len(wanted), self._longest):
            self.clear()
            return False
        if fresh:
            first, stop = len(self.rows), len(wanted)
            index = self.store.table([(row.seq, row.start, len(row.seq.ids) - 1) for row in fresh])
            for dense, paged in ((self.k, self.store.k), (self.v, self.store.v)):
                for layer in range(len(paged)):
                    dense[layer, first:stop, :, : index.shape[1]] = paged[layer][index].transpose(1, 2)
            self.rows.extend(fresh)
        if wanted is not self._wanted:
            self._wanted = wanted
            self.stacks = stack_prefixes(self.rows, self.stacks)
            self.starts = np.fromiter([row.start for row in self.rows], np.int64)
        return True

    def _place(self, seqs: list[Sequence]) -> list[WindowRow]:
        """Rows for new sequences, with the prefixes that they share with each other or with rows in the window."""
        rows = [WindowRow(seq, seq.pages) for seq in seqs]
        if not self.share:
            return rows
        alike: dict[int, list[WindowRow]] = {}
        size = self.store.page_size
        for row in rows:
            # Follow prefixes that are in the window already.
            while (at := row.start // size) < len(row.pages):
                known = self._prefixes.get(row.pages[at])
                if known is None or known.skip != at or row.pages[at : at + len(known.pages)] != known.pages:
                    break
                if len(row.seq.ids) <= row.start + len(known.pages) * size:
                    break
                row.prefixes, row.start = (*row.prefixes, known), row.start + len(known.pages) * size
            alike.setdefault(id(row.prefixes[-1]) if row.prefixes else 0, []).append(row)
        for part in alike.values():  # rows with the same start: new prefixes for what they share after it
            part_seqs = [row.seq for row in part]
            for stretch in shared_stretches(part_seqs, size, part[0].start // size):
                start, stop, seq = stretch.start, stretch.stop, part_seqs[stretch.rows[0]]
                cells = torch.from_numpy(self.store.cells(seq, start, stop))
                dense = [cache[:, cells].transpose(1, 2).contiguous() for cache in (self.store.k, self.store.v)]
                prefix = Prefix(seq.pages[start // size : stop // size], start // size, *dense)
                self._prefixes[prefix.pages[0]] = prefix
                for row in (part[index] for index in stretch.rows):
                    row.prefixes, row.start = (*row.prefixes, prefix), stop
        return rows

    def _compact(self, keep: set[int]) -> None:
        """Drop rows whose page list is not among these (by id), and fill the gaps with the last rows."""
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
            used = {id(prefix) for row in rows for prefix in row.prefixes}
            self._prefixes = {page: prefix for page, prefix in self._prefixes.items() if id(prefix) in used}

    def _grow(self, rows: int, length: int) -> bool:
        """Make room for that many rows of that length; False if this exceeds the limit."""
        layers, _, heads, dim = self.store.k.shape
        limit = self.limit // (2 * layers * heads * dim * self.store.k.element_size())
        rows, roomy, length = -(-rows // 16) * 16, -(-(length + length // 4) // 32) * 32, -(-length // 32) * 32
        # Decided by this step alone, not by earlier ones: a resumed run must round like the run that it continues.
        if rows * length > limit:
            return False
        have_rows, have_length = self._shape
        if rows <= have_rows and length <= have_length:
            return True
        # Leave room to grow, since growing copies everything and every step adds an id to each sequence.
        if max(rows, have_rows) * max(roomy, have_length) <= limit:
            rows, length = max(rows, have_rows), max(roomy, have_length)
        kept = min(length, have_length)
        for name in ("k", "v"):
            new = self.store.k.new_zeros(layers, rows, heads, length, dim)
            if self.rows:
                new[:, : len(self.rows), :, :kept] = getattr(self, name)[:, : len(self.rows), :, :kept]
            setattr(self, name, new)
        self._shape = (rows, length)
        return True
