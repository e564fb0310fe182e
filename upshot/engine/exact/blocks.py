"""Batch-invariant operations on the CPU: PyTorch's own, always called with the same shapes. mode.py dispatches to them.

Libraries choose their code by the shape of a call, and vector code may round differently from its scalar tail. So rows
are padded to blocks of a fixed size, and each block is a separate call. Within such a block, a row's result does not
depend on its index: `tests/engine/test_exact.py` checks this, and so does the engine when it starts, on the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from upshot.engine.kernels.plain import AttentionOptions

ROWS = 32
"""Rows per call."""
ELEMENTS = 4096
"""Elements per call of an elementwise function: few enough for one thread, and a multiple of every vector width."""
BATCH = 32
"""Matrices per batched call."""
KEYS = 64
"""Keys per block of attention."""
QUERIES = 8
"""Queries per tile of attention."""
TILES = 512
"""Attention tiles computed at once, which bounds the memory."""


def _pad_rows(x: Tensor, size: int) -> Tensor:
    """x as a contiguous, aligned tensor, padded to a multiple of `size` rows."""
    spare = -len(x) % size
    if spare:
        return torch.cat([x, x.new_zeros(spare, *x.shape[1:])])
    x = x.contiguous()
    return x if x.data_ptr() % 64 == 0 else x.clone()


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [rows, k] × b [k, n] (+ bias [n])."""
    wide = _pad_rows(a, ROWS)
    out = a.new_empty(len(wide), b.shape[1])
    for at in range(0, len(wide), ROWS):
        torch.mm(wide[at : at + ROWS], b, out=out[at : at + ROWS])
    return out[: len(a)] if bias is None else out[: len(a)] + bias


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, p, q] × b [n, q, r], for matrices of one small shape."""
    n = len(a)
    a, b = _pad_rows(a, BATCH), _pad_rows(b, BATCH)
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    for at in range(0, len(a), BATCH):
        torch.bmm(a[at : at + BATCH], b[at : at + BATCH], out=out[at : at + BATCH])
    return out[:n]


def by_element(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of one tensor."""
    flat = _pad_rows(x.reshape(-1), ELEMENTS)
    out = torch.cat([function(part) for part in flat.split(ELEMENTS)]) if len(flat) else function(flat)
    return out[: x.numel()].view(x.shape)


def by_row(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """A function of each row of x [..., n]; its results (a tensor or a tuple of them) keep the leading dimensions."""
    flat = x.reshape(-1, x.shape[-1])
    size = 512 if x.is_cuda else ROWS  # on a GPU many rows take no longer than few
    parts = [function(part) for part in _pad_rows(flat, size).split(size)]
    if isinstance(parts[0], Tensor):
        out = torch.cat(parts)[: len(flat)]
        return out.view(*x.shape[:-1], *out.shape[1:])
    joined = (torch.cat(some)[: len(flat)] for some in zip(*parts, strict=True))
    return tuple(some.view(*x.shape[:-1], *some.shape[1:]) for some in joined)


def pick_logprobs(logits: Tensor, ids: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature) at `ids`, one row each, float32; temperature 0 counts as 1."""
    inverse = 1.0 / torch.where(temperature > 0, temperature, 1.0)
    # Block by block, to avoid a float32 copy of all logits.
    parts = []
    for some, scale, chosen in zip(logits.split(ROWS), inverse.split(ROWS), ids.split(ROWS), strict=True):
        every = by_row(lambda x: x.log_softmax(-1), some.float() * scale[:, None])
        parts.append(every.gather(-1, chosen[:, None])[:, 0])
    return torch.cat(parts) if parts else logits.new_empty(0)


@dataclass(slots=True)
class Tiles:
    """Packed queries in tiles of up to QUERIES queries of one sequence, and the cells of the keys."""

    queries: Tensor
    """[tiles, QUERIES] Index of each query among the tokens; padding repeats the tile's first query."""
    real: Tensor
    """[tiles, QUERIES] False where a query is padding."""
    at: Tensor
    """[tiles, QUERIES] Position of each query in its sequence."""
    sequence: Tensor
    """[tiles] Row of `cells`."""
    cells: Tensor
    """[sequences, positions] Cells of the keys; padded with 0 to whole blocks of KEYS."""

    def only(self, some: Any) -> Tiles:
        """The tiles at the indices `some`."""
        return Tiles(self.queries[some], self.real[some], self.at[some], self.sequence[some], self.cells)


def tiles_of(starts: Tensor, counts: Tensor, cells: Tensor) -> Tiles:
    """Tiles of packed tokens: each sequence's `counts` queries from position `starts` on, one after another."""
    per = (counts + QUERIES - 1) // QUERIES
    sequence = torch.repeat_interleave(torch.arange(len(counts)), per)
    within = (torch.arange(len(sequence)) - torch.repeat_interleave(per.cumsum(0) - per, per)) * QUERIES
    steps = within[:, None] + torch.arange(QUERIES)
    real = steps < counts[sequence, None]
    steps = torch.where(real, steps, within[:, None])
    first = counts.cumsum(0) - counts
    return Tiles(first[sequence, None] + steps, real, starts[sequence, None] + steps, sequence, cells)


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: AttentionOptions) -> Tensor:
    """Causal attention of q [tokens, heads, dim] to k, v [cells, kv_heads, dim], in blocks of KEYS from position 0."""
    out = q.new_empty(q.shape)
    for start in range(0, len(tiles.sequence), TILES):
        part = tiles.only(slice(start, start + TILES))
        result = _attend(q[part.queries] * options.scale, k, v, part, options.window, options.softcap)
        out[part.queries[part.real]] = result[part.real]
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, window: int, softcap: float) -> Tensor:
    """The same for queries [tiles, QUERIES, heads, dim] of some tiles."""
    n, _, heads, dim = q.shape
    kv_heads = k.shape[1]
    q = q.view(n, QUERIES, kv_heads, heads // kv_heads, dim).transpose(1, 2).reshape(n, kv_heads, -1, dim)
    top = q.new_full((n, kv_heads, q.shape[2], 1), -1e30)
    out = q.new_zeros(n, kv_heads, q.shape[2], dim + 1)
    last = tiles.at.amax(1)
    for first in range(0, int(last.max()) + 1, KEYS):
        seen = last >= first
        if window:  # skip tiles whose first query does not look back that far
            seen &= tiles.at[:, 0] - window < first + KEYS
        live = seen.nonzero()[:, 0]
        if len(live):
            some = tiles.only(live)
            out[live], top[live] = _block(q[live], k, v, some, first, window, softcap, out[live], top[live])
    mixed = out[..., :dim] / out[..., dim:]
    return mixed.view(n, kv_heads, QUERIES, -1, dim).transpose(1, 2).reshape(n, QUERIES, heads, dim)


def _block(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, first: int, window: int, softcap: float, out: Tensor, top: Tensor
) -> tuple[Tensor, Tensor]:
    """Update the flash attention state by the keys first : first + KEYS: `out`, its last column the sum of weights, and
    the running maximum `top`. Keys that a query may not see add exact zeros."""
    n, kv_heads, lanes, dim = q.shape
    cells = tiles.cells[tiles.sequence, first : first + KEYS]
    keys, values = (x[cells].transpose(1, 2).reshape(-1, KEYS, dim) for x in (k, v))
    scores = batched_product(q.reshape(-1, lanes, dim), keys.transpose(1, 2)).view(n, kv_heads, lanes, KEYS)
    if softcap:
        scores = by_element(torch.tanh, scores / softcap) * softcap
    back = tiles.at[:, :, None] - torch.arange(first, first + KEYS)
    hidden = (back < 0) | (back >= window) if window else back < 0
    scores = scores.masked_fill(hidden.repeat_interleave(lanes // QUERIES, 1)[:, None], -torch.inf)
    high = torch.maximum(top, scores.amax(-1, keepdim=True))
    weights = by_element(torch.exp, scores - high)
    shrink = by_element(torch.exp, top - high)
    # A column of ones makes the sum of the weights part of the same product, in the same order.
    summed = batched_product(weights.view(-1, lanes, KEYS), F.pad(values, (0, 1), value=1.0))
    return out * shrink + summed.view(n, kv_heads, lanes, -1), high
