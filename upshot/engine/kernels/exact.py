"""Batch-invariant kernels for exact mode on a GPU (exact/): a row's result depends on that row alone.

Each kernel has one tile size, one order of summation and one compiled form per model. What varies from batch to batch
(rows, page sizes, strides) is neither a constexpr nor specialised on, because another compiled form may round
differently. There is no split-K, no merging and no second loop for blocks without a mask: with these, the order of
summation would depend on the batch. Engine and learner launch the same compiled forms, so they agree bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from upshot.engine.kernels.plain import AttentionOptions

QUERIES = 64
"""Queries per block at most, as cuda.steps.PREFILL_BLOCK."""


def align(x: Tensor) -> Tensor:
    """x, contiguous and at a multiple of 16 bytes, which compiled forms are specialised on."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@triton.jit(do_not_specialize=["M"])
def _product(
    a_ptr, b_ptr, bias_ptr, out_ptr, M,
    N: tl.constexpr, K: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs compute the same few row tiles, so that these stay in the L2 cache.
    tiles_n = tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // (GROUP_M * tiles_n) * GROUP_M
    size = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    rows = (first + within % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = within // size * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    row_live, col_live = (rows < M)[:, None], (cols < N)[None, :]
    a_at = a_ptr + rows.to(tl.int64)[:, None] * K + steps[None, :]
    b_at = b_ptr + cols.to(tl.int64)[None, :] * STRIDE_N + steps.to(tl.int64)[:, None] * STRIDE_K
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN:
            a = tl.load(a_at + k, mask=row_live, other=0.0)
            b = tl.load(b_at + k * STRIDE_K, mask=col_live, other=0.0)
        else:
            a = tl.load(a_at + k, mask=row_live & (steps < K - k)[None, :], other=0.0)
            b = tl.load(b_at + k * STRIDE_K, mask=col_live & (steps < K - k)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_live & col_live)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [rows, k] × b [k, n] (+ bias [n]); the tile depends on k, n and the dtype only."""
    m, k = a.shape
    n = b.shape[1]
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    if m == 0:
        return out
    narrow = a.dtype == torch.float32  # elements of twice the size: half the tile
    block_n = 64 if narrow or n <= 1024 else 128
    block_k = 32 if narrow else 64
    _product[(triton.cdiv(m, 64) * triton.cdiv(n, block_n),)](
        align(a), b, out if bias is None else bias, out, m,
        N=n, K=k, STRIDE_K=b.stride(0), STRIDE_N=b.stride(1), BLOCK_M=64, BLOCK_N=block_n, BLOCK_K=block_k,
        GROUP_M=8, EVEN=k % block_k == 0, BIAS=bias is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _mean(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, (tl.sum(total, 0) / N).to(out_ptr.dtype.element_ty))


def mean(x: Tensor) -> Tensor:
    """Mean over the last dimension."""
    n = x.shape[-1]
    out = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    if out.numel():
        _mean[(out.numel(),)](align(x), out, N=n, BLOCK=min(4096, triton.next_power_of_2(n)), num_warps=4)
    return out


@triton.jit
def _pick_logprobs(logits_ptr, ids_ptr, temperature_ptr, out_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    inverse = 1.0 / tl.where(temperature <= 0.0, 1.0, temperature)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(logits_ptr + row * V + cols, mask=cols < V, other=float("-inf")).to(tl.float32))
    top = tl.max(best, 0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * V + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
        total += tl.exp((x - top) * inverse)
    value = tl.load(logits_ptr + row * V + tl.load(ids_ptr + row)).to(tl.float32)
    tl.store(out_ptr + row, (value - top) * inverse - tl.log(tl.sum(total, 0)))


def pick_logprobs(logits: Tensor, ids: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature) at `ids`, one row each, float32; temperature 0 counts as 1."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(4096, triton.next_power_of_2(vocab))
        _pick_logprobs[(rows,)](
            align(logits), align(ids), align(temperature), out, V=vocab, BLOCK=block, num_warps=8
        )  # fmt: skip
    return out


_STRIDES = ["page_size", "k_page", "k_head", "k_token", "v_page", "v_head", "v_token", "table_stride", "window"]
_LISTS = ["table_ptr", "slots_ptr", "offsets_ptr", "counts_ptr", "positions_ptr"]


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_LISTS)
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, slots_ptr, offsets_ptr, counts_ptr, positions_ptr, table_stride,
    page_size, k_page, k_head, k_token, v_page, v_head, v_token, scale, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """A tile of queries × the query heads of one key head, over all keys from position 0 on in blocks of BLOCK_N.

    Keys that a row may not see add exact zeros, so it does not matter which other rows are in the tile.
    """
    kv_head = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    PER: tl.constexpr = TILE // GROUP
    skip = tl.program_id(2) * PER
    count = tl.minimum(tl.load(counts_ptr + block) - skip, PER)
    slot = tl.load(slots_ptr + block).to(tl.int64)
    token = tl.load(offsets_ptr + block).to(tl.int64) + skip
    position = tl.load(positions_ptr + block) + skip
    lanes = tl.arange(0, TILE)
    dims = tl.arange(0, PADDED)
    wide = (dims < D)[None, :]
    query = lanes // GROUP
    real = (query < count)[:, None]
    at = position + query
    row = ((token + query) * HEADS + kv_head * GROUP + lanes % GROUP) * D
    q = tl.load(q_ptr + row[:, None] + dims[None, :], mask=real & wide, other=0.0)
    stop = tl.where(count > 0, position + count, 0)  # nothing to read for an empty tile
    start = 0
    if WINDOW:
        start = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    acc = tl.zeros([TILE, PADDED], dtype=tl.float32)
    m = tl.full([TILE], -1e30, dtype=tl.float32)
    z = tl.zeros([TILE], dtype=tl.float32)
    for first in range(start, stop, BLOCK_N):
        offs = first + tl.arange(0, BLOCK_N)
        live = offs < stop
        page = tl.load(table_ptr + slot * table_stride + offs // page_size, mask=live, other=0).to(tl.int64)
        inside = (offs % page_size).to(tl.int64)
        # Strides are multiples of D, so that the compiler knows that rows are aligned.
        k_at = (page * k_page + kv_head * k_head + inside * k_token) * D
        v_at = (page * v_page + kv_head * v_head + inside * v_token) * D
        k = tl.load(k_ptr + k_at[:, None] + dims[None, :], mask=live[:, None] & wide, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
        back = at[:, None] - offs[None, :]
        seen = back >= 0
        if WINDOW:
            seen = seen & (back < window)
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        z = z * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + v_at[:, None] + dims[None, :], mask=live[:, None] & wide, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    out = (acc / z[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] + dims[None, :], out, mask=real & wide)


def attend(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, blocks: Tensor, options: AttentionOptions, queries: int = QUERIES
) -> Tensor:
    """Attention of packed q [tokens, heads, dim] over paged keys and values [pages, kv_heads, page_size, dim].

    `blocks` [4, blocks]: slot, first token, tokens (at most `queries`), position of the first.
    """
    heads, dim = q.shape[1:]
    scale, window, softcap, _, _ = options
    kv_heads, page_size = k.shape[1:3]
    group = heads // kv_heads
    tile = max(32 if q.dtype == torch.float32 else 64, triton.next_power_of_2(group))
    padded = max(16, triton.next_power_of_2(dim))
    # Copy keys or values unless they are aligned and their strides are multiples of D.
    odd = [x.data_ptr() % 16 or x.stride(3) != 1 or any(stride % dim for stride in x.stride()[:3]) for x in (k, v)]
    k, v = (x.contiguous().clone() if is_odd else x for x, is_odd in zip((k, v), odd, strict=True))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    strides = [s // dim for x in (k, v) for s in x.stride()[:3]]
    _attend[(kv_heads, blocks.shape[1], triton.cdiv(queries, tile // group))](
        align(q), k, v, out, table, blocks[0], blocks[1], blocks[2], blocks[3], table.stride(0), page_size, *strides,
        scale, softcap, window,
        HEADS=heads, GROUP=group, D=dim, PADDED=padded, TILE=tile, BLOCK_N=64 if padded <= 128 else 32,
        WINDOW=window > 0, SOFTCAP=softcap > 0, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
