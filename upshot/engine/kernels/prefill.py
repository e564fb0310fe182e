"""Prefill attention over the paged KV cache: packed queries, causal, GQA, sliding windows. cuda/runner.py calls it.

Each program computes one block of one sequence's queries for one head; `blocks` names the block. Queries of all
sequences are packed without padding. The chunk's own keys are in the pages already. Keys are addressed one by one
through the page table, since a block of keys may span several pages and a page several blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from upshot.engine.kernels.decode import add_sinks, find_pages
from upshot.engine.kernels.kv8 import VALUE_FACTOR, in_8_bits, value_place
from upshot.engine.kernels.plain import AttentionOptions


@triton.jit
def _sweep(
    q, acc, m, z, k_ptr, v_ptr, table_row, kv_head, at, lo, hi, stop, scale, softcap, window,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, EIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Flash attention over the keys lo:hi; without MASKED every query sees all of them.

    Updates acc [BLOCK_M, WIDTH], the running maximum m and the sum of weights z. Scores are in units of log 2, because
    exp2 is one instruction. m starts at -1e30 and not at -inf, since a row that sees no key would compute inf - inf.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    dims = tl.arange(0, WIDTH)
    for first in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        offs = first + tl.arange(0, BLOCK_N)
        live = offs < stop
        page, inside = find_pages(table_row, first, tl.arange(0, BLOCK_N), stop, PAGE, BLOCK_N)
        cell = (page * KV_HEADS + kv_head) * (PAGE * D) + inside * D
        there = live[:, None]
        if WIDTH > D:
            there = there & (dims < D)[None, :]
        k = tl.load(k_ptr + cell[:, None] + dims[None, :], mask=there, other=0.0)
        if EIGHT:
            k = k.to(tl.float16)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            e = tl.exp(2.0 * s * scale / softcap)
            s = softcap * LOG2E * (1.0 - 2.0 / (e + 1.0))
        else:
            s = s * (scale * LOG2E)
        if MASKED:
            back = at[:, None] - offs[None, :]
            seen = back >= 0
            if WINDOW:
                seen = seen & (back < window)
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        z = z * alpha + tl.sum(p, 1)
        if EIGHT:  # see decode.attend
            place = value_place(page, kv_head, inside, dims[:, None], KV_HEADS, D, PAGE)
            if WIDTH > D:
                v = tl.load(v_ptr + place, mask=(dims < D)[:, None], other=0.0)
            else:
                v = tl.load(v_ptr + place)
            v, p = tl.trans(v.to(tl.float16)), p / VALUE_FACTOR
        else:
            v = tl.load(v_ptr + cell[:, None] + dims[None, :], mask=there, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return acc, m, z


@triton.jit
def _chunks(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, slots_ptr, offsets_ptr, counts_ptr, positions_ptr, sinks_ptr,
    table_stride, scale, softcap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    EIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + block).to(tl.int64)
    offset = tl.load(offsets_ptr + block).to(tl.int64)
    count = tl.load(counts_ptr + block)
    position = tl.load(positions_ptr + block)
    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, WIDTH)
    real = lanes < count
    query = ((offset + lanes) * HEADS + head) * D
    there = real[:, None]
    if WIDTH > D:
        there = there & (dims < D)[None, :]
    q = tl.load(q_ptr + query[:, None] + dims[None, :], mask=there, other=0.0)
    if EIGHT:
        q = q.to(tl.float16)
    at = position + lanes
    stop = position + count
    start = 0
    # Blocks of keys that end before the first query need no mask, unless there is a window.
    whole = position // BLOCK_N * BLOCK_N
    if WINDOW:
        start = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
        whole = start
    table_row = table_ptr + slot * table_stride
    kv_head = head // (HEADS // KV_HEADS)
    acc = tl.zeros([BLOCK_M, WIDTH], dtype=tl.float32)
    m = tl.full([BLOCK_M], -1e30, dtype=tl.float32)
    z = tl.zeros([BLOCK_M], dtype=tl.float32)
    if count > 0:
        acc, m, z = _sweep(
            q, acc, m, z, k_ptr, v_ptr, table_row, kv_head, at, start, whole, stop, scale, softcap, window,
            KV_HEADS, D, WIDTH, PAGE, BLOCK_N, False, WINDOW, SOFTCAP, EIGHT, STAGES,
        )  # fmt: skip
        acc, m, z = _sweep(
            q, acc, m, z, k_ptr, v_ptr, table_row, kv_head, at, whole, stop, stop, scale, softcap, window,
            KV_HEADS, D, WIDTH, PAGE, BLOCK_N, True, WINDOW, SOFTCAP, EIGHT, STAGES,
        )  # fmt: skip
        if SINKS:
            z = add_sinks(z, m, sinks_ptr, head + lanes * 0, real)
        out = (acc / z[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + query[:, None] + dims[None, :], out, mask=there)


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, blocks: Tensor, options: AttentionOptions, block_m: int
) -> Tensor:
    """Attention of packed q [tokens, heads, dim] to k, v [pages, kv_heads, page_size, dim], in the shape of q.

    `table` [slots, columns]: the pages of each slot. `blocks` [4, blocks]: slot, index of the first token, number of
    tokens (at most `block_m`; 0: an unused block), position of the first token.
    """
    heads, dim = q.shape[1], q.shape[2]
    kv_heads, page = k.shape[1], k.shape[2]
    scale, window, softcap, sinks, _ = options
    out = torch.empty_like(q)
    width = max(16, triton.next_power_of_2(dim))  # a matrix product is at least 16 deep
    _chunks[(heads, blocks.shape[1])](
        q, k, v, out, table, blocks[0], blocks[1], blocks[2], blocks[3],
        q if sinks is None else sinks, table.stride(0), scale, softcap, window, HEADS=heads, KV_HEADS=kv_heads, D=dim,
        WIDTH=width, PAGE=page, BLOCK_M=block_m, BLOCK_N=32,
        WINDOW=window > 0, SOFTCAP=softcap > 0, SINKS=sinks is not None, EIGHT=in_8_bits(k), STAGES=2, num_warps=4,
    )  # fmt: skip
    return out
