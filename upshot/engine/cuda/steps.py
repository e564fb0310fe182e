"""The parts of a GPU step that cuda/runner.py puts together: KV cache, attention, graphs, results in flight."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upshot.engine.kernels.decode_fused import can_fuse
from upshot.engine.kernels.long import long_attention
from upshot.engine.kernels.long_rows import gather_pages
from upshot.engine.kernels.plain import AttentionOptions
from upshot.engine.kernels.prefill import prefill_attention
from upshot.engine.kernels.rotary import rotate_store, store
from upshot.engine.sampling import ScoreRequest
from upshot.engine.scheduler import Chunk
from upshot.engine.sequence import Scored, Sequence

PREFILL_BLOCK = 64
"""Queries per program of the prefill kernel."""
PREFILL_BUCKETS = [64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 14336, 16384]
"""Prompt ids for which prefill steps are captured; a step is padded to the next size."""
PREFILL_ROWS = [1, 4, 16, 64, 128, 256, 512, 1024]
"""The same for the number of tokens whose logits are needed."""
Results = tuple[list[Sequence], list[int], list[float], Any, list[Scored]]
"""Rows, their sampled ids, log-probabilities and likeliest ids; what was scored."""
COMPILING: set[Future[None]] = set()
"""Launches from compiling threads (warm.py) of all engines that have not happened yet. No step is captured meanwhile:
PyTorch hands out the same few streams again and again, and a launch on a stream that takes part in a capture would
become part of the graph."""


@dataclass(slots=True)
class Cache:
    """The KV cache."""

    k: Tensor
    """[layers, pages, kv_heads, page_size, dim]"""
    v: Tensor
    """The same; in 8 bits its pages are transposed (kernels/kv8.py)."""
    table: Tensor
    """[slots, columns] The pages of each slot."""


class CudaStep:
    """The attention of one step, decode or prefill, as drivers call it (`AttentionStep`)."""

    def __init__(
        self,
        cache: Cache,
        heads: int,
        positions: Tensor,
        cells: Tensor,
        attend: Callable[..., Tensor],
        fused: Callable[..., Tensor] | None = None,
    ) -> None:
        self.cache, self.heads = cache, heads
        self.positions, self.cells = positions, cells
        self._attend = attend
        self._fused = fused
        """Rotation, KV store and attention in one kernel, if the step allows it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Store and attend; see `AttentionStep`."""
        store(k, self.cells, self.cache.k[layer])
        store(v, self.cells, self.cache.v[layer])
        return self._attend(q.contiguous(), self.cache.k[layer], self.cache.v[layer], options)

    def rotate_attend(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: Any, options: AttentionOptions
    ) -> Tensor:
        """The same from the joined qkv product [tokens, (heads + 2 × kv_heads) × dim], not yet normed or rotated."""
        k, v = self.cache.k[layer], self.cache.v[layer]
        if self._fused is not None and can_fuse(k.shape[-1], cos, norms):
            return self._fused(qkv, k, v, cos, sin, norms, options)
        q = rotate_store(qkv, self.positions, self.cells, cos, sin, k, v, self.heads, norms)
        return self._attend(q, k, v, options)


@dataclass(frozen=True, slots=True)
class LongRuns:
    """The long chunks of a step, for cuDNN's attention; other chunks use our own kernel."""

    places: list[tuple[int, int, int, Tensor]]
    """Per long chunk: index of its first token, number of tokens, the sequence's length after it, its page table."""
    short: Tensor | None
    """[4, blocks] The queries of the other chunks (see `prefill_attention`); None if there are none."""
    table: Tensor

    @classmethod
    def of(cls, chunks: list[Chunk], long: list[Chunk], table: Tensor, short: Tensor | None) -> LongRuns:
        """For the `long` ones among all `chunks` of a step."""
        places, offset = [], 0
        for chunk in chunks:
            count = chunk.stop - chunk.start
            if chunk in long:
                places.append((offset, count, chunk.stop, table[chunk.seq.slot]))
            offset += count
        return cls(places, short, table)

    @property
    def longest(self) -> int:
        """The largest sequence length after its chunk."""
        return max(length for _, _, length, _ in self.places)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of a step's queries [tokens, heads, dim] to keys and values in pages."""
        if self.short is None:
            out = torch.empty_like(q)
        else:
            out = prefill_attention(q, k, v, self.table, self.short, options, PREFILL_BLOCK)
        for first, count, length, pages in self.places:
            keys, values = gather_pages(k, v, pages, length, q.dtype)
            out[first : first + count] = long_attention(q[first : first + count], keys, values, options.scale)
        return out


@dataclass(slots=True)
class Graph:
    """A captured decode step with its outputs, which the next replay overwrites."""

    graph: torch.cuda.CUDAGraph
    drawn: Tensor
    """Ids and log-probabilities: see `kernels.sample.sample`."""
    logits: Tensor
    """A view of `CudaRunner.logits`, which all graphs share."""


@dataclass(slots=True)
class PromptGraph:
    """A captured prefill step with its input and output buffers."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    """[3, tokens]: ids, positions, cells."""
    blocks: Tensor
    """[4, blocks]: see `prefill_attention`."""
    last: Tensor
    """[rows] The tokens whose logits are wanted."""
    logits: Tensor
    """[rows, vocab]"""


@dataclass(slots=True)
class Flight:
    """A launched step; its tensors are on the host and valid once `event` has happened."""

    rows: list[Sequence]
    drawn: Tensor
    """Ids and log-probabilities of the rows: see `kernels.sample.sample`."""
    event: torch.cuda.Event | None
    tops: tuple[Tensor, Tensor] | None = None
    """[rows, most] Log-probabilities and ids of the likeliest ids."""
    scored: tuple[ScoreRequest, tuple[Tensor, ...]] | None = None


def pack_chunks(chunks: list[Chunk], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Chunks packed without padding: ids, positions and cells of all tokens [3, tokens], int64, and their blocks of
    queries for `prefill_attention` [4, blocks], int32. `size`: ids per page."""
    counts = np.array([c.stop - c.start for c in chunks])
    starts = np.array([c.start for c in chunks])
    offsets = np.cumsum(counts) - counts
    total = int(counts.sum())
    ids, pages = array("i"), array("i")
    for chunk in chunks:
        seq = chunk.seq
        ids += seq.packed()[chunk.start : chunk.stop]
        pages.fromlist(seq.pages[chunk.start // size : (chunk.stop - 1) // size + 1])
    n_pages = (starts + counts - 1) // size - starts // size + 1
    page_at = np.cumsum(n_pages) - n_pages
    within = np.arange(total) - np.repeat(offsets, counts)
    positions = within + np.repeat(starts, counts)
    index = np.repeat(page_at - starts // size, counts) + positions // size
    cells = np.array(pages, dtype=np.int64)[index] * size + positions % size
    n_blocks = -(-counts // PREFILL_BLOCK)
    first = (np.arange(int(n_blocks.sum())) - np.repeat(np.cumsum(n_blocks) - n_blocks, n_blocks)) * PREFILL_BLOCK
    slots = np.repeat(np.array([c.seq.slot for c in chunks]), n_blocks)
    left = np.minimum(PREFILL_BLOCK, np.repeat(counts, n_blocks) - first)
    blocks = np.stack([slots, np.repeat(offsets, n_blocks) + first, left, np.repeat(starts, n_blocks) + first])
    return np.stack([np.array(ids), positions, cells]), blocks.astype(np.int32)
