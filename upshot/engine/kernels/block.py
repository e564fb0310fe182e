"""What lies between the matrix products of a Llama block: norms, rotary embedding, gate; one kernel each.

They round where transformers rounds (each operation's result in the model's dtype), so that sampler and learner agree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    rows,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    live = cols < N
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * N + cols, mask=live, other=0.0).to(tl.float32)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + (part * rows + row) * N + cols, mask=live, other=0.0)
        x = x.to(dtype).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * N + cols, mask=live, other=0.0).to(tl.float32)
        summed = (x + residual).to(dtype)
        tl.store(sum_ptr + row * N + cols, summed, mask=live)
        x = summed.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
    weight = tl.load(weight_ptr + cols, mask=live, other=0.0).to(tl.float32)
    normed = (x * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * N + cols, (normed * weight).to(dtype), mask=live)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of x + residual, and x + residual itself; x may be [parts, rows, n], the float32 parts of a sum."""
    rows, n = x.shape[-2:]
    out = torch.empty(rows, n, dtype=weight.dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(n)
    parts = x.shape[0] if x.dim() == 3 else 1
    _add_norm[(rows,)](
        x, x if residual is None else residual, weight, out, summed, rows, eps,
        N=n, BLOCK=block, ADD=residual is not None, PARTS=parts,
        num_warps=4 if block < 2048 else 8 if parts == 1 else 16,
    )  # fmt: skip
    return out, summed


@triton.jit
def _gate(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < N
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * N + cols, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * N + N + cols, mask=live, other=0.0).to(tl.float32)
    act = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * N + cols, (act * up).to(dtype), mask=live)


def gate(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) × second half."""
    rows, n = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    block = min(2048, triton.next_power_of_2(n))
    _gate[(rows, triton.cdiv(n, block))](x, out, N=n, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _rotate_store(
    qkv_ptr,
    positions_ptr,
    cells_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dtype = q_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    heads = tl.arange(0, TILE)
    dims = tl.arange(0, HALF)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cell = tl.load(cells_ptr + token).to(tl.int64)
    base = token * ((HEADS + 2 * KV_HEADS) * D) + heads[:, None] * D + dims[None, :]
    live = (heads < HEADS + 2 * KV_HEADS)[:, None]
    raw1 = tl.load(qkv_ptr + base, mask=live, other=0.0)
    raw2 = tl.load(qkv_ptr + base + HALF, mask=live, other=0.0)
    x1, x2 = raw1.to(tl.float32), raw2.to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)
        is_q = (heads < HEADS)[:, None]
        w1 = tl.where(
            is_q,
            tl.load(q_weight_ptr + dims)[None, :].to(tl.float32),
            tl.load(k_weight_ptr + dims)[None, :].to(tl.float32),
        )
        w2 = tl.where(
            is_q,
            tl.load(q_weight_ptr + HALF + dims)[None, :].to(tl.float32),
            tl.load(k_weight_ptr + HALF + dims)[None, :].to(tl.float32),
        )
        x1 = ((x1 * scale[:, None]).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
        x2 = ((x2 * scale[:, None]).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + position * HALF + dims)[None, :].to(tl.float32)
    sin = tl.load(sin_ptr + position * HALF + dims)[None, :].to(tl.float32)
    r1 = ((x1 * cos).to(dtype).to(tl.float32) - (x2 * sin).to(dtype).to(tl.float32)).to(dtype)
    r2 = ((x2 * cos).to(dtype).to(tl.float32) + (x1 * sin).to(dtype).to(tl.float32)).to(dtype)
    q_at = token * HEADS * D + heads[:, None] * D + dims[None, :]
    q_live = (heads < HEADS)[:, None]
    tl.store(q_ptr + q_at, r1, mask=q_live)
    tl.store(q_ptr + q_at + HALF, r2, mask=q_live)
    page, offset = cell // PAGE, cell % PAGE
    k_head = heads - HEADS
    k_at = ((page * KV_HEADS + k_head[:, None]) * PAGE + offset) * D + dims[None, :]
    k_live = (k_head >= 0)[:, None] & (k_head < KV_HEADS)[:, None]
    tl.store(k_ptr + k_at, r1, mask=k_live)
    tl.store(k_ptr + k_at + HALF, r2, mask=k_live)
    v_at = k_at - KV_HEADS * PAGE * D
    v_live = (k_head >= KV_HEADS)[:, None] & live
    tl.store(v_ptr + v_at, raw1, mask=v_live)
    tl.store(v_ptr + v_at + HALF, raw2, mask=v_live)


def rotate_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cells: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Rotated queries [tokens, heads, dim]; rotated keys and values go to their cells (page × page_size + offset)."""
    tokens = qkv.shape[0]
    kv_heads, page, dim = k.shape[1:]
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = norms if norms is not None else (qkv, qkv, 0.0)
    _rotate_store[(tokens,)](
        qkv, positions, cells, cos, sin, q_weight, k_weight, q, k, v, eps,
        HEADS=heads, KV_HEADS=kv_heads, D=dim, PAGE=page, TILE=triton.next_power_of_2(heads + 2 * kv_heads),
        NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    return q


@triton.jit
def _store(
    x_ptr,
    cells_ptr,
    cache_ptr,
    stride_t,
    stride_h,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, TILE)
    dims = tl.arange(0, WIDTH)
    cell = tl.load(cells_ptr + token).to(tl.int64)
    live = (heads < KV_HEADS)[:, None]
    if WIDTH > D:
        live = live & (dims < D)[None, :]
    x = tl.load(x_ptr + token * stride_t + heads[:, None] * stride_h + dims[None, :], mask=live)
    at = ((cell // PAGE * KV_HEADS + heads[:, None]) * PAGE + cell % PAGE) * D + dims[None, :]
    tl.store(cache_ptr + at, x, mask=live)


def store(x: torch.Tensor, cells: torch.Tensor, cache: torch.Tensor) -> None:
    """Put x [tokens, kv_heads, dim] into its cells of a layer's cache."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    kv_heads, page, dim = cache.shape[1:]
    _store[(x.shape[0],)](
        x,
        cells,
        cache,
        x.stride(0),
        x.stride(1),
        KV_HEADS=kv_heads,
        D=dim,
        WIDTH=triton.next_power_of_2(dim),
        PAGE=page,
        TILE=triton.next_power_of_2(kv_heads),
    )
