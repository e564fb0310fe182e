"""Decode attention over the paged KV cache: one new token per row, GQA, split-K, shared prefixes read once.

cuda/runner.py calls `decode_attention`. Cache layout of a layer: [pages, kv_heads, page_size, dim]. Time is spent on
reading pages, so each page is read once for all query heads of a key head (a group): these form the rows of a tile,
padded to 16 for the matrix units. decode_plan.py cuts contexts into pieces and says which rows share each. Kernels:

- `_read`: each program computes one piece for one key head and all rows that share the piece. In 16 bits it is launched
  twice side by side, for small tiles (as many rows as fit into 16 lanes) and large ones (up to MEMBERS rows); in 8 bits
  for small ones only.
- `_merge`: merges the partial results of each row. A row with a single part needs no merging: `_read` writes its
  result. If a product in 8 bits follows, `_merge` also quantizes all rows.
- decode_fused.py has a third kernel, for steps whose rows share nothing and are read whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from upshot.engine.decode_plan import OPEN, DecodeTiles
from upshot.engine.kernels.fp8 import ScaledRows, empty_rows8, store_row
from upshot.engine.kernels.kv8 import VALUE_FACTOR, in_8_bits, value_place
from upshot.engine.kernels.launch import processors, shared_memory
from upshot.engine.kernels.plain import AttentionOptions

MEMBERS = 16
"""Rows per program at most."""
MOST_TILE_BYTES = 1 << 16
"""Shared memory for a tile's queries: 64 KiB; with more, there is no room for keys and values."""


@triton.jit
def find_pages(table_row, start, within, stop, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of the positions start + within [BLOCK_N], and their offsets in them; page 0 from `stop` on.

    If BLOCK_N is a multiple of PAGE, blocks begin at page boundaries (all callers see to that); `max_constancy` tells
    the compiler, so that it loads neighbouring cells together.
    """
    offs = start + within
    if BLOCK_N % PAGE == 0:
        page = tl.load(table_row + offs // PAGE, mask=start + within // PAGE * PAGE < stop, other=0).to(tl.int64)
        page = tl.max_constancy(page, PAGE)
        inside = within % PAGE
    else:
        page = tl.load(table_row + offs // PAGE, mask=offs < stop, other=0).to(tl.int64)
        inside = offs % PAGE
    return page, inside


@triton.jit
def _load_page(
    k_ptr, v_ptr, table_row, start, hi, head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    EIGHT: tl.constexpr,
):  # fmt: skip
    """Keys and values [BLOCK_N, WIDTH] from position `start` on; entries from `hi` on are finite, otherwise arbitrary.

    If BLOCK_N == PAGE, the page number is a scalar and its cells are contiguous, which allows the compiler to prefetch.
    """
    dims = tl.arange(0, WIDTH)
    within = tl.arange(0, BLOCK_N)
    live = start + within < hi
    if BLOCK_N == PAGE:
        page = tl.load(table_row + start // PAGE, mask=start < hi, other=0).to(tl.int64)
        inside = within
    else:
        page, inside = find_pages(table_row, start, within, hi, PAGE, BLOCK_N)
    cell = (page * KV_HEADS + head) * (PAGE * D) + inside * D
    there = live[:, None]
    if WIDTH > D:
        there = there & (dims < D)[None, :]
    if EIGHT:
        # The whole page, in loads of 16 bytes: every cell holds a finite number (kv8.py), and those behind the end get
        # weight 0.
        at = value_place(page, head, inside, dims[:, None], KV_HEADS, D, PAGE)
        if WIDTH > D:
            k = tl.load(k_ptr + cell[:, None] + dims[None, :], mask=(dims < D)[None, :], other=0.0)
            v = tl.load(v_ptr + at, mask=(dims < D)[:, None], other=0.0)
        else:
            k = tl.load(k_ptr + cell[:, None] + dims[None, :])
            v = tl.load(v_ptr + at)
        k, v = k.to(tl.float16), tl.trans(v.to(tl.float16))
    else:
        k = tl.load(k_ptr + cell[:, None] + dims[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + cell[:, None] + dims[None, :], mask=there, other=0.0)
    return k, v


@triton.jit
def _score(
    q, k, start, hi, first, scale, softcap, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr
):  # fmt: skip
    """Scores [TILE, BLOCK_N] of q with these keys, in units of log 2; -inf where a row does not see the key."""
    LOG2E: tl.constexpr = 1.4426950408889634
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # no TF32: greedy ids must be the model's own
    if SOFTCAP:
        # tanh by exp: the interpreter does not have libdevice's
        e = tl.exp(2.0 * s * scale / softcap)
        s = softcap * LOG2E * (1.0 - 2.0 / (e + 1.0))
    else:
        s = s * (scale * LOG2E)
    offs = start + tl.arange(0, BLOCK_N)
    seen = (offs < hi)[None, :]
    if WINDOW:
        seen = seen & (offs[None, :] >= first[:, None])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def attend(
    q, acc, m, z, k_ptr, v_ptr, table_row, head, lo, hi, first, scale, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    PAIR: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Flash attention of the tile q [TILE, WIDTH] over positions lo:hi of the pages in `table_row`.

    Updates acc [TILE, WIDTH], the running maximum m (in units of log 2) and the sum of weights z. WINDOW: a row sees
    positions from its `first` on. WIDTH: D rounded up to a power of two, at least 16. EIGHT: keys and values are in 8
    bits (kv8.py) and become float16, which represents them exactly. PAIR: two blocks per iteration, whose products do
    not wait for each other, with one maximum and one rescaling for both.
    """
    if EIGHT:
        q = q.to(tl.float16)
        acc = acc * VALUE_FACTOR  # values in the pages have this factor
    for start in tl.range(lo, hi, 2 * BLOCK_N if PAIR else BLOCK_N, num_stages=STAGES):
        # All loads before the first product, since memory is the bottleneck.
        k, v = _load_page(k_ptr, v_ptr, table_row, start, hi, head, KV_HEADS, D, WIDTH, PAGE, BLOCK_N, EIGHT)
        if PAIR:
            second = start + BLOCK_N
            k2, v2 = _load_page(k_ptr, v_ptr, table_row, second, hi, head, KV_HEADS, D, WIDTH, PAGE, BLOCK_N, EIGHT)
        s = _score(q, k, start, hi, first, scale, softcap, BLOCK_N, WINDOW, SOFTCAP)
        top = s
        if PAIR:
            s2 = _score(q, k2, second, hi, first, scale, softcap, BLOCK_N, WINDOW, SOFTCAP)
            top = tl.maximum(s, s2)
        # m starts at -1e30, not at -inf: where a row sees nothing, -inf - -inf would be NaN.
        m_new = tl.maximum(m, tl.max(top, 1))
        p = tl.exp2(s - m_new[:, None])
        total = p
        if PAIR:
            p2 = tl.exp2(s2 - m_new[:, None])
            total = p + p2
        alpha = tl.exp2(m - m_new)
        z = z * alpha + tl.sum(total, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        if PAIR:
            acc = tl.dot(p2.to(v.dtype), v2, acc, input_precision="ieee")
        m = m_new
    if EIGHT:
        acc = acc / VALUE_FACTOR
    return acc, m, z


@triton.jit
def add_sinks(z, m, sinks_ptr, heads, real):
    """Add the weight of each head's sink (a key without a value) to the sum of weights z."""
    LOG2E: tl.constexpr = 1.4426950408889634
    sinks = tl.load(sinks_ptr + heads, mask=real, other=float("-inf")).to(tl.float32) * LOG2E
    return z + tl.exp2(tl.minimum(sinks - m, 126.0))  # no overflow; the values' share is 0 then anyway


@triton.jit
def _read(
    q_ptr, k_ptr, v_ptr, out_ptr, parts_ptr, sums_ptr, table_ptr, slots_ptr, lengths_ptr, pieces_ptr, rows_ptr,
    sinks_ptr, table_stride, scale, softcap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    PAIR: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, EIGHT: tl.constexpr, STAGES: tl.constexpr,
    OPEN: tl.constexpr,
):  # fmt: skip
    """One piece for one key head; `pieces_ptr` and `rows_ptr` are the tables of `decode_plan.Reads`."""
    head = tl.program_id(0)
    piece = pieces_ptr + tl.program_id(1) * (3 + MEMBERS)
    lo = tl.load(piece)
    end = tl.load(piece + 1)
    if end > 0:  # otherwise it is padding of a CUDA graph's table
        leader = tl.load(piece + 3)
        slot = tl.load(slots_ptr + leader).to(tl.int64)
        hi = tl.minimum(end, tl.load(lengths_ptr + leader))
        lanes = tl.arange(0, TILE)
        dims = tl.arange(0, WIDTH)
        row = tl.load(piece + 3 + lanes // GROUP, mask=lanes < MEMBERS * GROUP, other=-1).to(tl.int64)
        real = row >= 0
        row = tl.maximum(row, 0)
        first = lanes
        if WINDOW:
            first = tl.load(lengths_ptr + row) - window
            # Skip what is before the earliest window of these rows; blocks begin at page boundaries.
            lo = tl.maximum(lo, tl.min(tl.where(real, first, 1 << 30), 0)) // PAGE * PAGE
        own_head = head * GROUP + lanes % GROUP
        query = row * HEADS + own_head
        there = real[:, None]
        if WIDTH > D:
            there = there & (dims < D)[None, :]
        q = tl.load(q_ptr + query[:, None] * D + dims[None, :], mask=there, other=0.0)
        acc = tl.zeros([TILE, WIDTH], dtype=tl.float32)
        m = tl.full([TILE], -1e30, dtype=tl.float32)
        z = tl.zeros([TILE], dtype=tl.float32)
        acc, m, z = attend(
            q, acc, m, z, k_ptr, v_ptr, table_ptr + slot * table_stride, head, lo, hi, first, scale, softcap,
            KV_HEADS, D, WIDTH, PAGE, BLOCK_N, PAIR, WINDOW, SOFTCAP, EIGHT, STAGES,
        )  # fmt: skip
        if SINKS:  # once per row: in its last piece, which no window leaves empty
            z = tl.where(end == OPEN, add_sinks(z, m, sinks_ptr, own_head, real), z)
        value = acc / tl.where(z > 0, z, 1.0)[:, None]
        alone = tl.load(rows_ptr + row * 2 + 1) == 1  # its only part: write the result, there is no merging
        tl.store(
            out_ptr + query[:, None] * D + dims[None, :],
            value.to(out_ptr.dtype.element_ty),
            mask=there & alone[:, None],
        )
        part = (tl.load(rows_ptr + row * 2) + tl.load(piece + 2)).to(tl.int64) * HEADS + own_head
        tl.store(parts_ptr + part[:, None] * D + dims[None, :], value, mask=there & (alone == 0)[:, None])
        # Parts are divided by their own sums already; `_merge` weights them by these log-sum-exps (in log 2).
        sums = tl.where(z > 0, m + tl.log2(tl.maximum(z, 1e-30)), -1e30)
        tl.store(sums_ptr + part, sums, mask=real & (alone == 0))


@triton.jit
def _merge(
    parts_ptr, sums_ptr, out_ptr, narrow_ptr, scale_ptr, rows_ptr,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, HEAD_TILE: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row, for HEAD_TILE heads; NARROW: also quantize it, for all heads."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(rows_ptr + row * 2).to(tl.int64)
    count = tl.load(rows_ptr + row * 2 + 1)
    if NARROW or count != 1:  # padding rows have 0 parts and get zeros
        heads = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
        dims = tl.arange(0, WIDTH)
        real = heads < HEADS
        top = tl.full([HEAD_TILE], -1e30, dtype=tl.float32)
        total = tl.zeros([HEAD_TILE], dtype=tl.float32)
        acc = tl.zeros([HEAD_TILE, WIDTH], dtype=tl.float32)
        for start in range(0, tl.where(count == 1, 0, count), PARTS):
            at = (first + start) * HEADS + heads
            read = start + tl.zeros_like(heads)  # as a vector, since the interpreter cannot mask by a scalar
            new = top
            for part in tl.static_range(PARTS):
                live = real & (read + part < count)
                new = tl.maximum(new, tl.load(sums_ptr + at + part * HEADS, mask=live, other=-1e30))
            old = tl.exp2(top - new)
            acc *= old[:, None]
            total *= old
            for part in tl.static_range(PARTS):
                live = real & (read + part < count)
                sums = tl.load(sums_ptr + at + part * HEADS, mask=live, other=-1e30)
                weight = tl.where(live, tl.exp2(sums - new), 0.0)
                there = live[:, None]
                if WIDTH > D:
                    there = there & (dims < D)[None, :]
                value = tl.load(parts_ptr + (at + part * HEADS)[:, None] * D + dims[None, :], mask=there, other=0.0)
                acc += value.to(tl.float32) * weight[:, None]
                total += weight
            top = new
        inside = real[:, None]
        if WIDTH > D:
            inside = inside & (dims < D)[None, :]
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        cells = heads[:, None] * D + dims[None, :]
        if NARROW:
            ready = inside & (count + tl.zeros_like(heads) == 1)[:, None]  # its only part, written by `_read`
            out += tl.load(out_ptr + row * HEADS * D + cells, mask=ready, other=0.0).to(tl.float32)
            store_row(out, row, cells, inside, narrow_ptr, scale_ptr, HEADS * D)
        else:
            tl.store(out_ptr + row * HEADS * D + cells, out.to(out_ptr.dtype.element_ty), mask=inside)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A second stream for the current one. Not shared between streams of several engines: the allocator might give
    memory that one engine's side stream has written, and its main stream not yet read, to another engine."""
    return _beside_stream(device, torch.cuda.current_stream(device).cuda_stream)


@cache
def _beside_stream(device: torch.device, current: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch on another stream, after everything launched on the current one so far; None: on the current one."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The tables of `decode_plan.Reads` on the device, padded with zeros."""

    narrow: Tensor
    wide: Tensor | None
    """None: no large tiles."""
    rows: Tensor
    """[rows, 2] Index of each row's first part, and how many it has."""
    parts: int
    """The size of the buffer of parts; 0: no row has more than one part."""


def tiles_for(
    heads: int, kv_heads: int, dim: int, queries: torch.dtype, eight: bool, device: torch.device
) -> DecodeTiles:
    """How many rows a program serves, and how many programs fill the GPU; `eight`: keys and values are in 8 bits.

    Small tiles prefetch further. So they are faster for few rows, and always in 8 bits, where reading a page twice
    costs little (docs/dev/performance-2026-11.md, "Large tiles").
    """
    group, width = heads // kv_heads, triton.next_power_of_2(dim) * queries.itemsize
    narrow, wide = max(1, 16 // group), MEMBERS
    # Shared memory holds a tile one and a quarter times, and two blocks of keys.
    most = min(MOST_TILE_BYTES, (shared_memory(device) - 2 * WIDE.block * width) * 4 // 5)
    while wide and triton.next_power_of_2(wide * group) * width > most:
        wide //= 2
    each = processors(device) / kv_heads
    fill = max(1, int(6 * each)), max(1, int(2 * each))
    return DecodeTiles(narrow, wide if wide > narrow and not eight else 0, fill, 2 * narrow + 1)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a program iterates over keys: keys per block, whether two blocks per iteration, warps, pipeline stages."""

    block: int
    pair: bool
    warps: int
    stages: int


WIDE = Tuning(64, False, 4, 2)
"""For programs with a large tile."""


def tune(programs: int, k: Tensor) -> Tuning:
    """For programs with a small tile: one warp. In 16 bits one page per iteration, with eight stages if that does not
    leave the last wave of programs emptier, else six. In 8 bits two pages, since arithmetic is the bottleneck, and six.

    `programs`: 0 for pieces of a plan.
    """
    page, dim = k.shape[2], triton.next_power_of_2(k.shape[3])
    block = page if page >= 16 else 16

    def filled(stages: int) -> float:
        """The share of all waves of programs that is used, by the shared memory that the stages take."""
        each = block * dim * k.element_size() * (stages - 1) + 1024
        waves = programs / (processors(k.device) * max(1, min(32, shared_memory(k.device) // each)))
        return waves / max(1.0, -(-waves // 1))

    eight = in_8_bits(k)
    far = not eight and programs > 0 and filled(6) <= filled(8) + 0.15
    return Tuning(block, eight, 1 if dim <= 128 else 2, 8 if far else 6)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
    plan: DecodePlan,
    narrow: bool = False,
) -> Tensor | ScaledRows:
    """Attention of q [rows, heads, dim] over each row's pages, where its own key and value are stored already.

    k, v: [pages, kv_heads, page_size, dim]. `table` [slots, columns]: pages. `slots`, `lengths` [rows]. `narrow`: the
    result is wanted in 8 bits, [rows, heads × dim], which it is only if parts are merged, where it costs nothing.
    """
    rows, heads, dim = q.shape
    kv_heads, page = k.shape[1], k.shape[2]
    group, width = heads // kv_heads, max(16, triton.next_power_of_2(dim))  # a matrix product is at least 16 deep
    scale, window, softcap, sinks, _ = options
    out = torch.empty_like(q)
    # Partial results in float32; in 16 bits if keys and values have only 8.
    kind = q.dtype if in_8_bits(k) else torch.float32
    parts = torch.empty(plan.parts, heads, dim, dtype=kind, device=q.device)
    sums = torch.empty(plan.parts, heads, dtype=torch.float32, device=q.device)

    def read(pieces: Tensor, tuning: Tuning) -> None:
        members = pieces.shape[1] - 3
        _read[(kv_heads, len(pieces))](
            q, k, v, out, parts, sums, table, slots, lengths, pieces, plan.rows, q if sinks is None else sinks,
            table.stride(0), scale, softcap, window, HEADS=heads, KV_HEADS=kv_heads, GROUP=group, MEMBERS=members,
            TILE=max(16, triton.next_power_of_2(members * group)), D=dim, WIDTH=width, PAGE=page, BLOCK_N=tuning.block,
            PAIR=tuning.pair, WINDOW=window > 0, SOFTCAP=softcap > 0, SINKS=sinks is not None, EIGHT=in_8_bits(k),
            STAGES=tuning.stages, OPEN=OPEN, num_warps=tuning.warps,
        )  # fmt: skip

    side = _side_stream(q.device) if plan.wide is not None and q.is_cuda else None
    if plan.wide is not None:
        # Concurrently with the small tiles, since these programs are few and wait long. In a graph, a parallel branch.
        with _on_stream(side):
            read(plan.wide, WIDE)
    read(plan.narrow, tune(0 if plan.parts else kv_heads * rows, k))
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
    if not plan.parts:
        return out
    # A quantized row has one scale, so one program needs all of its heads.
    most = triton.next_power_of_2(heads)
    some, warps = (most, min(8, max(4, most // 4))) if narrow else (min(8, most), 4)
    small = empty_rows8(rows, heads * dim, q.device) if narrow else ScaledRows(out, sums)
    _merge[(rows, triton.cdiv(heads, some))](
        parts, sums, out, *small, plan.rows,
        HEADS=heads, D=dim, WIDTH=width, PARTS=4, HEAD_TILE=some, NARROW=narrow, num_warps=warps,
    )  # fmt: skip
    return small if narrow else out
