"""Keys and values in pages on the CPU, and plain attention over them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from upshot.engine.kernels.plain import AttentionOptions
from upshot.engine.llama.driver import Shape
from upshot.engine.sequence import Sequence
from upshot.engine.swap_slot import SwapSlot, allocate_pages

Span = tuple[Sequence, int, int]
"""Positions start : stop of a sequence."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions, causal: bool = False
) -> Tensor:
    """Attention of q [batch, heads, queries, dim]; mask True where a query may look."""
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
        # A decode step puts the heads that share a key head into the place of queries: each has its own sink.
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
        """Room for all pages."""
        self.k, self.v = allocate_pages(self._size, self._dtype, torch.device("cpu"), self._swap_slot)

    def release(self) -> None:
        """No room for any, until `take`."""
        self.k, self.v = (torch.zeros(0, dtype=self._dtype) for _ in range(2))

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages (from, to) in all layers."""
        if not copies:
            return
        source, target = (torch.tensor(x) for x in zip(*copies, strict=True))
        for cache in (self.k, self.v):
            pages = cache.view(cache.shape[0], -1, self.page_size, *cache.shape[2:])
            pages[:, target] = pages[:, source]

    def write(self, layer: int, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values of new tokens."""
        self.k[layer].index_copy_(0, cells, k)
        self.v[layer].index_copy_(0, cells, v)

    def table(self, spans: list[Span], multiple: int = 1) -> Tensor:
        """Where these spans lie, a row each, padded with 0 to the longest, rounded up to a `multiple`."""
        width = -(-max(stop - start for _, start, stop in spans) // multiple) * multiple
        cells = np.zeros((len(spans), width), dtype=np.int64)
        for row, (seq, start, stop) in enumerate(spans):
            cells[row, : stop - start] = self.cells(seq, start, stop)
        return torch.from_numpy(cells)

    def cells(self, seq: Sequence, start: int, stop: int) -> np.ndarray:
        """Where positions start:stop of a sequence lie."""
        positions = np.arange(start, stop)
        return np.asarray(seq.pages)[positions // self.page_size] * self.page_size + positions % self.page_size
