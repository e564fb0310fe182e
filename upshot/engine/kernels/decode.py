"""Attention of one new token a sequence over paged keys and values (GQA, split-K, shared prefixes read once).

Cache layout of a layer: [pages, kv_heads, page_size, dim]. The query heads of one key head are the rows of a tile,
padded to 16 for the matrix units: one new token has too few rows for them otherwise, and the pages, whose reading takes
the time, are read once for all heads of a group. Three kernels (and a fourth in decode_fused.py for the plain case):
- `_rows`: each program one sequence, one key head, one split of its own part of the context;
- `_prefix`: each program up to MEMBERS sequences that share their first pages: the prefix is read once for all;
- `_merge`: combines what the others left (unless there is one part only, which `_rows` writes itself).
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

from upshot.engine.kernels.kv8 import VALUE_FACTOR, in_8_bits, value_place
from upshot.engine.kernels.launch import processors
from upshot.engine.kernels.plain import AttentionOptions

MEMBERS = 16
"""Sequences of a shared prefix that one program serves."""
MOST_TILE_BYTES = 1 << 16
"""Queries of those sequences; with more, keys and values would not fit beside them."""


@triton.jit
def find_pages(table_row, start, within, stop, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each of BLOCK_N positions from `start` on, and where in it; none behind `stop` is looked up.

    Blocks begin where pages begin, unless pages are the larger ones: the compiler is told, and loads what lies side by
    side at once.
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
def attend(
    q, real, acc, m, z, k_ptr, v_ptr, table_row, head, lo, hi, first, scale, softcap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, EIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Flash attention of the tile q over positions lo:hi (none before `first`) of the pages in `table_row`.

    Rows that are not `real` fill the tile up; their weight is 0. `m` is in units of log 2. With BLOCK_N == PAGE the
    page is one scalar and its keys lie side by side. WIDTH is D, or the next power of two where D is none. EIGHT: keys
    and values are in 8 bits (kv8.py) and become float16, which holds them exactly.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    dims = tl.arange(0, WIDTH)
    within = tl.arange(0, BLOCK_N)
    if EIGHT:
        q = q.to(tl.float16)
    for start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        offs = start + within
        live = (offs < hi) & (offs >= first)
        if BLOCK_N == PAGE:
            page = tl.load(table_row + start // PAGE).to(tl.int64)
            inside = within
        else:
            page, inside = find_pages(table_row, start, within, hi, PAGE, BLOCK_N)
        cell = (page * KV_HEADS + head) * (PAGE * D) + inside * D
        there = live[:, None]
        if WIDTH > D:
            there = there & (dims < D)[None, :]
        # Both loads before the first product: a step waits for memory, not for arithmetic.
        k = tl.load(k_ptr + cell[:, None] + dims[None, :], mask=there, other=0.0)
        if EIGHT:
            # The whole page, in loads of 16 bytes: ids behind the end have weight 0, and every cell holds a number.
            at = value_place(page, head, inside, dims[:, None], KV_HEADS, D, PAGE)
            if WIDTH > D:
                v = tl.load(v_ptr + at, mask=(dims < D)[:, None], other=0.0)
            else:
                v = tl.load(v_ptr + at)
            k, v = k.to(tl.float16), tl.trans(v.to(tl.float16))
        else:
            v = tl.load(v_ptr + cell[:, None] + dims[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # float32 stays float32: greedy ids are the model's own
        if SOFTCAP:
            # tanh from exp: libdevice's is not there in the interpreter
            e = tl.exp(2.0 * s * scale / softcap)
            s = softcap * LOG2E * (1.0 - 2.0 / (e + 1.0))
        else:
            s = s * (scale * LOG2E)
        s = tl.where(live[None, :] & real[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        z = z * alpha + tl.sum(p, 1)
        if EIGHT:
            p = p / VALUE_FACTOR
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return acc, m, z


@triton.jit
def add_sinks(z, m, sinks_ptr, heads, real):
    """The sum with the weight of each head's sink in it, a key without a value."""
    LOG2E: tl.constexpr = 1.4426950408889634
    sinks = tl.load(sinks_ptr + heads, mask=real, other=float("-inf")).to(tl.float32) * LOG2E
    return z + tl.exp2(tl.minimum(sinks - m, 126.0))  # beyond that nothing is left of the values anyway


@triton.jit(do_not_specialize=["parts"])
def _rows(
    q_ptr, k_ptr, v_ptr, out_ptr, acc_ptr, ml_ptr, table_ptr, slots_ptr, lengths_ptr, starts_ptr, sinks_ptr,
    table_stride, scale, softcap, window, parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, ALONE: tl.constexpr, SHARED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, EIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    begin = 0
    if SHARED:
        begin = tl.load(starts_ptr + row)
    first = begin
    if WINDOW:
        first = tl.maximum(begin, length - window)
        begin = first // PAGE * PAGE
    # Whole blocks: where a block is a page, none may be cut between two splits. A split behind the end reads nothing
    # and leaves a part of weight 0, which `_merge` adds like any other.
    per = tl.cdiv(tl.cdiv(length - begin, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    lo = begin + split * per
    hi = tl.minimum(lo + per, length)
    lanes = tl.arange(0, TILE)
    dims = tl.arange(0, WIDTH)
    query = (row.to(tl.int64) * HEADS + head * GROUP + lanes) * D
    real = lanes < GROUP
    there = real[:, None]
    if WIDTH > D:
        there = there & (dims < D)[None, :]
    q = tl.load(q_ptr + query[:, None] + dims[None, :], mask=there, other=0.0)
    acc = tl.zeros([TILE, WIDTH], dtype=tl.float32)
    m = tl.full([TILE], -1e30, dtype=tl.float32)
    z = tl.zeros([TILE], dtype=tl.float32)
    acc, m, z = attend(
        q, real, acc, m, z, k_ptr, v_ptr, table_ptr + slot * table_stride, head, lo, hi, first, scale, softcap,
        KV_HEADS, D, WIDTH, PAGE, BLOCK_N, SOFTCAP, EIGHT, STAGES,
    )  # fmt: skip
    if SINKS:
        z = tl.where(split == 0, add_sinks(z, m, sinks_ptr, head * GROUP + lanes, real), z)
    if ALONE:
        tl.store(out_ptr + query[:, None] + dims[None, :], (acc / z[:, None]).to(out_ptr.dtype.element_ty), mask=there)
    else:
        part = (row.to(tl.int64) * HEADS + head * GROUP + lanes) * parts + split
        tl.store(acc_ptr + part[:, None] * D + dims[None, :], acc, mask=there)
        tl.store(ml_ptr + part * 2, m, mask=real)
        tl.store(ml_ptr + part * 2 + 1, z, mask=real)


@triton.jit(do_not_specialize=["parts"])
def _prefix(
    q_ptr, k_ptr, v_ptr, acc_ptr, ml_ptr, table_ptr, leaders_ptr, prefix_ptr, members_ptr, table_stride, scale,
    softcap, parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, MEMBERS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr,
    EIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    group = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(prefix_ptr + group)
    if length > 0:  # a captured step has room for more groups than there are now
        slot = tl.load(leaders_ptr + group).to(tl.int64)
        splits = tl.num_programs(2)
        per = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
        lo = split * per
        hi = tl.minimum(lo + per, length)
        lanes = tl.arange(0, TILE)
        dims = tl.arange(0, WIDTH)
        row = tl.load(members_ptr + group * MEMBERS + lanes // GROUP, mask=lanes < MEMBERS * GROUP, other=-1).to(
            tl.int64
        )
        real = row >= 0
        query = tl.maximum(row, 0) * HEADS + head * GROUP + lanes % GROUP
        there = real[:, None]
        if WIDTH > D:
            there = there & (dims < D)[None, :]
        q = tl.load(q_ptr + query[:, None] * D + dims[None, :], mask=there, other=0.0)
        acc = tl.zeros([TILE, WIDTH], dtype=tl.float32)
        m = tl.full([TILE], -1e30, dtype=tl.float32)
        z = tl.zeros([TILE], dtype=tl.float32)
        acc, m, z = attend(
            q, real, acc, m, z, k_ptr, v_ptr, table_ptr + slot * table_stride, head, lo, hi, 0, scale, softcap,
            KV_HEADS, D, WIDTH, PAGE, BLOCK_N, SOFTCAP, EIGHT, STAGES,
        )  # fmt: skip
        part = query * parts + parts - splits + split  # behind the parts that `_rows` leaves
        tl.store(acc_ptr + part[:, None] * D + dims[None, :], acc, mask=there)
        tl.store(ml_ptr + part * 2, m, mask=real)
        tl.store(ml_ptr + part * 2 + 1, z, mask=real)


@triton.jit(do_not_specialize=["parts", "own"])
def _merge(
    acc_ptr, ml_ptr, out_ptr, starts_ptr, parts, own,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr, PADDED: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    heads = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    each = tl.arange(0, PADDED)
    dims = tl.arange(0, WIDTH)
    count = own
    if SHARED:
        count = tl.where(tl.load(starts_ptr + row) > 0, parts, own)
    here = row.to(tl.int64) * HEADS + heads
    live = (heads < HEADS)[:, None] & (each < count)[None, :]
    at = here[:, None] * parts + each[None, :]
    m = tl.load(ml_ptr + at * 2, mask=live, other=-1e30)
    z = tl.load(ml_ptr + at * 2 + 1, mask=live, other=0.0)
    # Each part was scaled by its own maximum; the common one makes them comparable.
    top = tl.max(m, 1)
    weight = tl.where(live, tl.exp2(m - top[:, None]), 0.0)
    total = tl.sum(weight * z, 1)
    there = live[:, :, None]
    inside = (heads < HEADS)[:, None]
    if WIDTH > D:
        there = there & (dims < D)[None, None, :]
        inside = inside & (dims < D)[None, :]
    acc = tl.load(acc_ptr + at[:, :, None] * D + dims[None, None, :], mask=there, other=0.0)
    out = tl.sum(acc * weight[:, :, None], 1) / total[:, None]
    tl.store(out_ptr + here[:, None] * D + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(slots=True)
class SharedPrefixes:
    """Groups of rows that share their first pages; an unused group has prefix 0."""

    leaders: Tensor
    """[groups] a slot whose pages hold the prefix."""
    prefix: Tensor
    """[groups] length of the prefix, a multiple of the page size."""
    members: Tensor
    """[groups, MEMBERS] rows, -1 where there is none."""
    starts: Tensor
    """[rows] where each row's own part begins (0: it shares nothing)."""
    splits: int = 4


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream beside the current one. Each has its own: what one engine's kernels leave there for the current
    stream to read would else be given to another engine's before it is read."""
    return _beside_stream(device, torch.cuda.current_stream(device).cuda_stream)


@cache
def _beside_stream(device: torch.device, current: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch on another stream, after what the current one has so far."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a program walks its keys: how many at a time, by how many warps, loads how far ahead."""

    block: int
    warps: int
    stages: int


def tune(programs: int, k: Tensor) -> Tuning:
    """One page at a time by one warp, eight loads ahead; six where that lets the last programs run with the others.

    No `programs`: many small parts, for which it does not matter.
    """
    page, dim = k.shape[2], max(16, triton.next_power_of_2(k.shape[3]))
    block = page if page >= 16 else 16

    def filled(stages: int) -> float:
        """How much of the last wave of programs there is, by the shared memory that loads under way take."""
        each = block * dim * k.element_size() * (stages - 1) + 1024
        waves = programs / (processors(k.device) * max(1, min(32, (227 << 10) // each)))
        return waves / max(1.0, -(-waves // 1))

    return Tuning(block, 1 if dim <= 128 else 2, 6 if filled(6) > filled(8) + 0.15 else 8)


def context_splits(programs: int, device: torch.device) -> int:
    """Into how many parts each context is split so that few rows keep the whole GPU busy.

    Three numbers only: each is a kernel to compile and a graph to capture.
    """
    wanted = 3 * processors(device) // programs
    return 16 if wanted >= 16 else 4 if wanted >= 4 else 1


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
    splits: int = 1,
    shared: SharedPrefixes | None = None,
) -> Tensor:
    """Attention of q [rows, heads, dim], whose keys and values are stored already, over each row's pages."""
    rows, heads, dim = q.shape
    kv_heads, page = k.shape[1], k.shape[2]
    group = heads // kv_heads
    scale, window, softcap, sinks, _ = options
    width, tile = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(MEMBERS * group))
    if window or tile * width * q.element_size() > MOST_TILE_BYTES:
        shared = None  # a sliding window rarely reaches back to the prefix
    parts = splits + (shared.splits if shared is not None else 0)
    out = torch.empty_like(q)
    acc = ml = out
    if parts > 1:
        acc = torch.empty(rows, heads, parts, dim, dtype=torch.float32, device=q.device)
        ml = torch.empty(rows, heads, parts, 2, dtype=torch.float32, device=q.device)
    starts = shared.starts if shared is not None else lengths
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "GROUP": group, "D": dim, "PAGE": page, "SOFTCAP": softcap > 0}
    sizes |= {"WIDTH": width, "EIGHT": in_8_bits(k)}
    side = _side_stream(q.device) if shared is not None and q.is_cuda else None
    if shared is not None:
        # Beside the rows, not before them: few programs, long waits. In a captured step this is a parallel branch.
        with _on_stream(side):
            _prefix[(kv_heads, len(shared.prefix), shared.splits)](
                q, k, v, acc, ml, table, shared.leaders, shared.prefix, shared.members, table.stride(0), scale, softcap,
                parts, TILE=tile, MEMBERS=MEMBERS, BLOCK_N=64, STAGES=2, num_warps=4, **sizes,
            )  # fmt: skip
    tuning = tune(kv_heads * rows * splits if parts == 1 else 0, k)
    _rows[(kv_heads, rows, splits)](
        q, k, v, out, acc, ml, table, slots, lengths, starts, q if sinks is None else sinks, table.stride(0), scale,
        softcap, window, parts, TILE=max(16, triton.next_power_of_2(group)), ALONE=parts == 1,
        SHARED=shared is not None, SINKS=sinks is not None, WINDOW=window > 0, BLOCK_N=tuning.block,
        STAGES=tuning.stages, num_warps=tuning.warps, **sizes,
    )  # fmt: skip
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
    if parts > 1:
        padded = 8 if parts <= 8 else 32
        some = min(64 // padded, triton.next_power_of_2(heads))
        _merge[(rows, triton.cdiv(heads, some))](
            acc, ml, out, starts, parts, splits, HEADS=heads, D=dim, WIDTH=width, SHARED=shared is not None,
            PADDED=padded, HEAD_TILE=some, num_warps=4,
        )  # fmt: skip
    return out
