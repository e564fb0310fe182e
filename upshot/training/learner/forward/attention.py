"""Attention over flat tokens: each segment of a layout attends to itself and to what it continues, causally.

Where segments are shared, the keys and values of a reply's beginning are copied in front of its own for the time of the
call. The causal mask is then that of a query block at the end of its keys, which flash attention supports, windows
included. On a GPU, long segments take one call each of cuDNN's attention (engine/kernels/long.py); the others take
PyTorch's flash attention for ragged lengths, without padding. Everywhere else (CPU, float32, head sizes that flash
refuses, soft caps) segments of similar length are padded, for the attention alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from upshot.engine.kernels import plain
from upshot.engine.kernels.long import SHORTEST, cudnn_takes, lay_out, long_attention_backward, run_forward
from upshot.engine.kernels.plain import AttentionOptions
from upshot.training.learner.batch import Layout, on_device, sum_rows

Attend = Callable[[int, Tensor, Tensor, Tensor, AttentionOptions], Tensor]
"""(layer, q [N, heads, dim], k, v [N, kv_heads, dim], options) → [N, heads, dim], differentiable; without sinks."""
LIKE = 0.75
"""Segments are padded together when the shortest has this share of the longest one's keys."""
FLASH_TYPES = (torch.bfloat16, torch.float16)


class PaddedSegments(NamedTuple):
    """Segments of like length side by side."""

    segments: int
    queries: int
    """Those of the longest; a shorter segment repeats its last one."""
    keys: int
    seen: Tensor | None
    """[segments, queries, keys] How many tokens a key lies before a query, negative where it is not to be seen. None:
    the same numbers begin both, so that the plain causal mask holds."""


class PackedAttention:
    """The attention of one batch: made once, called by every layer."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device, self.tokens = layout, device, layout.tokens
        self.lines: list[np.ndarray] = []
        """The keys of each segment, its own the last of them."""
        for segment in layout.segments:
            own = np.arange(segment.start, segment.start + segment.length)
            self.lines.append(own if segment.parent < 0 else np.concatenate([self.lines[segment.parent], own]))
        self.starts = np.array([segment.start for segment in layout.segments])
        self.lengths = np.array([segment.length for segment in layout.segments])
        self.widths = np.array([len(line) for line in self.lines])
        """How many queries and how many keys each segment has."""
        # At least 2: for single queries flash has a form of its own, which has no backward.
        self.max_queries, self.max_keys = max(2, int(self.lengths.max())), int(self.widths.max())
        ends = np.cumsum([[0, *self.lengths], [0, *self.widths]], axis=1)
        query_ends, key_ends = on_device(ends.astype(np.int32), device)
        self.sizes = (query_ends, key_ends, self.max_queries, self.max_keys)
        """Where queries and keys of each segment end, and the most that one has of them."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of q [N, heads, dim] to k, v [N, kv_heads, dim]."""
        long = self.tokens >= SHORTEST * len(self.lines)  # on average: then a call each is worth it
        if long and options.is_plain(self.max_keys) and cudnn_takes(q):
            return LongSegments.apply(q, k, v, self, options.scale)  # type: ignore[no-any-return]
        if q.is_cuda and q.dtype in FLASH_TYPES and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and not options.softcap:
            return Flash.apply(q, k, v, self, options)  # type: ignore[no-any-return]
        groups, query_places, key_places, places = self._padded
        # All groups are picked at once, so that backward adds their gradients up once.
        queries = q.index_select(0, query_places).split([group.segments * group.queries for group in groups])
        sizes = [group.segments * group.keys for group in groups]
        keys = IndexedRows.apply(k, key_places).split(sizes)
        values = IndexedRows.apply(v, key_places).split(sizes)
        outputs = []
        for group, *of_group in zip(groups, queries, keys, values, strict=True):
            q, k, v = [x.view(group.segments, -1, *x.shape[1:]).transpose(1, 2) for x in of_group]
            window = options.window if options.window < group.keys else 0
            out = plain.attention(q, k, v, group.seen, options._replace(window=window))
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, places)

    @cached_property
    def keys(self) -> Tensor | None:
        """The flat tokens whose keys are laid side by side; None: they are already."""
        return on_device(np.concatenate(self.lines), self.device) if self.layout.shares else None

    @cached_property
    def readers(self) -> tuple[Tensor, Tensor]:
        """Where among `keys` each flat token is: places, and where each token's places end."""
        keys = np.concatenate(self.lines)
        ends = np.cumsum([0, *np.bincount(keys, minlength=self.tokens)])
        order = np.argsort(keys, kind="stable")
        return on_device(order.astype(np.int32), self.device), on_device(ends.astype(np.int32), self.device)

    @cached_property
    def _padded(self) -> tuple[list[PaddedSegments], Tensor, Tensor, Tensor]:
        """Segments grouped by like length; the queries and the keys of all groups, one group after the other; and where
        each flat token is among those queries."""
        order = np.argsort(-self.widths, kind="stable").tolist()
        cuts = [0]
        for place, segment in enumerate(order):
            if self.widths[segment] < LIKE * self.widths[order[cuts[-1]]]:
                cuts.append(place)
        flat_keys, key_starts = np.concatenate(self.lines), np.cumsum(self.widths) - self.widths
        places = np.empty(self.tokens, dtype=np.int64)
        groups: list[PaddedSegments] = []
        all_queries, all_keys, before = [], [], 0
        for first, stop in pairwise([*cuts, len(order)]):
            group = order[first:stop]
            lengths, widths = self.lengths[group, None], self.widths[group, None]
            at, key_at = np.arange(lengths.max()), np.arange(widths.max())
            queries = self.starts[group, None] + np.minimum(at, lengths - 1)
            keys = flat_keys[key_starts[group, None] + np.minimum(key_at, widths - 1)]
            seen = None
            if (lengths != widths).any():
                last_key = widths - lengths + np.minimum(at, lengths - 1)
                seen = torch.from_numpy(last_key[:, :, None] - key_at).to(self.device)
            groups.append(PaddedSegments(len(group), len(at), len(key_at), seen))
            places[queries[at < lengths]] = before + np.flatnonzero(at < lengths)
            before += queries.size
            all_queries.append(queries.flatten())
            all_keys.append(keys.flatten())
        query_places = torch.from_numpy(np.concatenate(all_queries)).to(self.device)
        key_places = torch.from_numpy(np.concatenate(all_keys)).to(self.device)
        return groups, query_places, key_places, torch.from_numpy(places).to(self.device)


class IndexedRows(torch.autograd.Function):
    """Rows by index, of which some are taken more than once: their gradients add up in float32, in one order."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor) -> Tensor:
        """[N, …] → [M, …]."""
        ctx.save_for_backward(rows)
        ctx.count = len(states)
        return states.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """[M, …] → [N, …]."""
        (rows,) = ctx.saved_tensors
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return sum_rows(ctx.count, rows, wide).to(grad.dtype), None


class Flash(torch.autograd.Function):
    """PyTorch's flash attention over ragged lengths; grouped heads are not repeated."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: PackedAttention, options: AttentionOptions) -> Tensor:
        """[N, heads, dim]. Keys and values laid side by side are not kept: the backward pass copies them again."""
        ctx.spans, ctx.dropout = spans, options.dropout
        ctx.options = {"scale": options.scale}
        if 0 < options.window < spans.max_keys:
            ctx.options |= {"window_size_left": options.window - 1, "window_size_right": 0}
        keys, values = _lay_side_by_side(k, v, spans)
        # The operation itself, as scaled_dot_product_attention has no ragged lengths and would repeat grouped heads.
        out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(
            q, keys, values, *spans.sizes, options.dropout, True, False, **ctx.options
        )
        ctx.save_for_backward(q, k, v, out, lse, seed, unused)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of q, k and v."""
        q, k, v, out, lse, seed, unused = ctx.saved_tensors
        spans: PackedAttention = ctx.spans
        keys, values = _lay_side_by_side(k, v, spans)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, keys, values, out, lse, *spans.sizes, ctx.dropout, True, seed, unused, **ctx.options
        )
        return dq, *_add_up(dk, dv, spans), None, None


class LongSegments(torch.autograd.Function):
    """cuDNN's attention, one call a segment, for long segments; grouped heads are not repeated."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: PackedAttention, scale: float) -> Tensor:
        """[N, heads, dim]. Keys and values laid side by side are not kept, as in `Flash`."""
        outs, parts = [], []
        for segment, keys, values in _segments(k, v, spans):
            run = lay_out(q[segment], keys, values)
            part = run_forward(run, scale)
            outs.append(part.out[0].transpose(0, 1)[run.lead : run.lead + segment.stop - segment.start])
            # Without its result: a view of `out` kept here would keep the whole graph alive, which keeps this.
            parts.append(part._replace(out=part.lse))
        out = _whole(outs)
        ctx.spans, ctx.scale, ctx.parts = spans, scale, parts
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of q, k and v."""
        q, k, v, out = ctx.saved_tensors
        grad = grad.contiguous()
        gradients = [
            long_attention_backward(grad[segment], q[segment], keys, values, out[segment], part, ctx.scale)
            for (segment, keys, values), part in zip(_segments(k, v, ctx.spans), ctx.parts, strict=True)
        ]
        dq, dk, dv = map(_whole, zip(*gradients, strict=True))
        return dq, *_add_up(dk, dv, ctx.spans), None, None


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Segments one after the other; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _segments(k: Tensor, v: Tensor, spans: PackedAttention) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The queries, keys and values of each segment."""
    keys, values = _lay_side_by_side(k, v, spans)
    first = 0
    for segment, line in zip(spans.layout.segments, spans.lines, strict=True):
        columns = slice(first, first + len(line))
        yield slice(segment.start, segment.start + segment.length), keys[columns], values[columns]
        first = columns.stop


def _add_up(dk: Tensor, dv: Tensor, spans: PackedAttention) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values, summed over all segments that read them."""
    if spans.keys is None:
        return dk, dv
    from upshot.engine.kernels.segment_sum import segment_sums

    return segment_sums(dk, dv, *spans.readers)


def _lay_side_by_side(k: Tensor, v: Tensor, spans: PackedAttention) -> tuple[Tensor, Tensor]:
    if spans.keys is None:
        return k, v
    return k.index_select(0, spans.keys), v.index_select(0, spans.keys)
