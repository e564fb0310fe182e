"""Queries and keys out of the joined product: normed where heads have norms, rotated; and the way back.

One kernel each way, for all heads; cos and sin are read once a token, never laid out by head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from upshot.engine.kernels.decode import processors
from upshot.engine.kernels.launch import Launcher

Turn = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of each token, [tokens, dim / 2]."""
HeadNorms = tuple[torch.Tensor, torch.Tensor, float]
"""The weights of the norms of queries and of keys, and what is added to the variance."""


@triton.jit
def _turn(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    BOTH: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, WIDTH)
    inside = dims < HALF
    dtype = out_ptr.dtype.element_ty
    live = (heads < BOTH)[:, None] & inside[None, :]
    at = heads[:, None] * (2 * HALF) + dims[None, :]
    x1 = tl.load(x_ptr + token * X_STRIDE + at, mask=live, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + token * X_STRIDE + at + HALF, mask=live, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)
        w1, w2 = _head_weights(q_weight_ptr, k_weight_ptr, (heads < HEADS)[:, None], dims, inside, HALF)
        x1 = ((x1 * scale[:, None]).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
        x2 = ((x2 * scale[:, None]).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    r1 = ((x1 * cos).to(dtype).to(tl.float32) - (x2 * sin).to(dtype).to(tl.float32)).to(dtype)
    r2 = ((x2 * cos).to(dtype).to(tl.float32) + (x1 * sin).to(dtype).to(tl.float32)).to(dtype)
    tl.store(out_ptr + token * OUT_STRIDE + at, r1, mask=live)
    tl.store(out_ptr + token * OUT_STRIDE + at + HALF, r2, mask=live)


@triton.jit
def _head_weights(q_weight_ptr, k_weight_ptr, is_q, dims, inside, HALF: tl.constexpr):
    """Both halves of the weight of each head's norm."""
    q1 = tl.load(q_weight_ptr + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    k1 = tl.load(k_weight_ptr + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    q2 = tl.load(q_weight_ptr + HALF + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    k2 = tl.load(k_weight_ptr + HALF + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    return tl.where(is_q, q1, k1), tl.where(is_q, q2, k2)


_launch_turn = Launcher(_turn)


def turn(
    qkv: torch.Tensor, turn: Turn, heads: int, kv_heads: int, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys (normed if `norms`) rotated, and values: views [tokens, heads, dim].

    Without norms they are rotated in place: the product itself is not needed again.
    """
    cos, sin = turn
    tokens, half, both = len(qkv), cos.shape[1], heads + kv_heads
    out = qkv if norms is None else qkv.new_empty(tokens, both * 2 * half)
    q_weight, k_weight, eps = norms if norms is not None else (qkv, qkv, 0.0)
    tile = min(16, triton.next_power_of_2(both))
    width = triton.next_power_of_2(half)
    _launch_turn(
        (tokens, triton.cdiv(both, tile), 1),
        (qkv, out, cos, sin, q_weight, k_weight),
        (eps,),
        (qkv.shape[1], out.shape[1], heads, both, half, width, tile, norms is not None),
        4,
    )
    shaped = out.view(tokens, -1, 2 * half)
    return shaped[:, :heads], shaped[:, heads:both], qkv.view(tokens, -1, 2 * half)[:, both:]


@triton.jit(do_not_specialize=["tokens"])
def _turn_backward(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    raw_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    parts_ptr,
    tokens,
    eps,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, WIDTH)
    inside = dims < HALF
    dtype = out_ptr.dtype.element_ty
    is_q = (heads < HEADS)[:, None]
    is_v = (heads >= HEADS + KV_HEADS)[:, None]
    q_live = is_q & inside[None, :]
    k_live = (heads >= HEADS)[:, None] & (heads < HEADS + KV_HEADS)[:, None] & inside[None, :]
    v_live = is_v & (heads < ALL)[:, None] & inside[None, :]
    live = (heads < ALL)[:, None] & inside[None, :]
    q_at = heads[:, None] * Q_HEAD + dims[None, :]
    k_at = (heads - HEADS)[:, None] * K_HEAD + dims[None, :]
    v_at = (heads - HEADS - KV_HEADS)[:, None] * V_HEAD + dims[None, :]
    at = heads[:, None] * (2 * HALF) + dims[None, :]
    q1 = tl.zeros([WIDTH], dtype=tl.float32)
    q2 = tl.zeros([WIDTH], dtype=tl.float32)
    k1 = tl.zeros([WIDTH], dtype=tl.float32)
    k2 = tl.zeros([WIDTH], dtype=tl.float32)
    if NORM:
        w1, w2 = _head_weights(q_weight_ptr, k_weight_ptr, is_q, dims, inside, HALF)
    token = tl.program_id(0).to(tl.int64)
    for _ in range(tl.program_id(0), tokens, tl.num_programs(0)):
        d1 = tl.load(dq_ptr + token * Q_TOKEN + q_at, mask=q_live, other=0.0).to(tl.float32)
        d2 = tl.load(dq_ptr + token * Q_TOKEN + q_at + HALF, mask=q_live, other=0.0).to(tl.float32)
        d1 += tl.load(dk_ptr + token * K_TOKEN + k_at, mask=k_live, other=0.0).to(tl.float32)
        d2 += tl.load(dk_ptr + token * K_TOKEN + k_at + HALF, mask=k_live, other=0.0).to(tl.float32)
        d1 += tl.load(dv_ptr + token * V_TOKEN + v_at, mask=v_live, other=0.0).to(tl.float32)
        d2 += tl.load(dv_ptr + token * V_TOKEN + v_at + HALF, mask=v_live, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + token * HALF + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
        sin = tl.load(sin_ptr + token * HALF + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
        r1 = tl.where(is_v, d1, d1 * cos + d2 * sin)
        r2 = tl.where(is_v, d2, d2 * cos - d1 * sin)
        if NORM:
            x1 = tl.load(raw_ptr + token * (ALL * 2 * HALF) + at, mask=live, other=0.0).to(tl.float32)
            x2 = tl.load(raw_ptr + token * (ALL * 2 * HALF) + at + HALF, mask=live, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
            n1, n2 = x1 * scale, x2 * scale
            if WEIGHT:
                s1 = r1 * n1.to(dtype).to(tl.float32)
                s2 = r2 * n2.to(dtype).to(tl.float32)
                q1 += tl.sum(tl.where(is_q, s1, 0.0), 0)
                q2 += tl.sum(tl.where(is_q, s2, 0.0), 0)
                k1 += tl.sum(tl.where(k_live, s1, 0.0), 0)
                k2 += tl.sum(tl.where(k_live, s2, 0.0), 0)
            g1, g2 = r1 * w1, r2 * w2
            mean = ((tl.sum(g1 * n1, 1) + tl.sum(g2 * n2, 1)) / (2 * HALF))[:, None]
            r1 = tl.where(is_v, r1, (g1 - n1 * mean) * scale)
            r2 = tl.where(is_v, r2, (g2 - n2 * mean) * scale)
        tl.store(out_ptr + token * (ALL * 2 * HALF) + at, r1.to(dtype), mask=live)
        tl.store(out_ptr + token * (ALL * 2 * HALF) + at + HALF, r2.to(dtype), mask=live)
        token += tl.num_programs(0)
    if WEIGHT:
        part = parts_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (4 * HALF) + dims
        tl.store(part, q1, mask=inside)
        tl.store(part + HALF, q2, mask=inside)
        tl.store(part + 2 * HALF, k1, mask=inside)
        tl.store(part + 3 * HALF, k2, mask=inside)


_launch_turn_backward = Launcher(_turn_backward)


def turn_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    turn: Turn,
    raw: torch.Tensor | None,
    norms: HeadNorms | None,
    wants_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradient of the joined product, and of the head norms' weights, from those of what `turn` gave.

    `raw`: the product itself, where there are norms.
    """
    cos, sin = turn
    dq, dk, dv = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk, dv))
    (tokens, heads, dim), kv_heads = dq.shape, dk.shape[1]
    whole = heads + 2 * kv_heads
    out = torch.empty(tokens, whole * dim, dtype=dq.dtype, device=dq.device)
    tile = min(16, triton.next_power_of_2(whole))
    programs, tiles, parts = tokens, triton.cdiv(whole, tile), out
    if wants_weight:
        programs = min(tokens, processors(dq.device) * 8)
        parts = torch.empty(programs * tiles, 2, dim, dtype=torch.float32, device=dq.device)
    q_weight, k_weight, eps = norms if norms is not None else (out, out, 0.0)
    width = triton.next_power_of_2(dim // 2)
    _launch_turn_backward(
        (programs, tiles, 1),
        (dq, dk, dv, out if raw is None else raw, cos, sin, q_weight, k_weight, out, parts),
        (tokens, eps),
        (
            *(dq.stride(0), dq.stride(1), dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1)),
            *(heads, kv_heads, dim // 2, width, tile, norms is not None, wants_weight),
        ),
        4,
    )
    if not wants_weight:
        return out, None, None
    of_q, of_k = parts.sum(0)
    return out, of_q.to(q_weight.dtype), of_k.to(k_weight.dtype)
