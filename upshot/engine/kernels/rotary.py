"""Norms and rotary embedding of queries and keys, from the joined qkv product [tokens, (heads + 2 × kv_heads) × dim].

Two kernels, because engine and learner need different layouts, and a second pass would read and write everything again:

- `rotate_store`, for the engine: keys and values go to their cells of the paged cache, queries to a new tensor; cos and
  sin are tables of all positions. `store` only stores, for drivers that rotate by themselves.
- `rotate_heads`, for the learner: in place if heads have no norms; cos and sin are those of each token; norms are per
  head. `rotate_heads_backward` is its gradient.

Both round where transformers rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from upshot.engine.kernels.fp8 import ScaledRows, parts_of
from upshot.engine.kernels.kv8 import KEY_FACTOR, VALUE_FACTOR, in_8_bits, to_8_bits, value_place
from upshot.engine.kernels.launch import Launcher, processors
from upshot.engine.kernels.plain import HeadNorms, Rotation


@triton.jit
def _inverse_rms(x1, x2, eps, D: tl.constexpr):
    """The factor of each head's RMS norm; x1 and x2 are the halves of the heads."""
    return 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)


@triton.jit
def scale_heads(x, scale, weight, like_ptr, FORM: tl.constexpr):
    """Scale and weight of a norm, rounded to the dtype of `like_ptr` by its form (plain.EARLY, LATE, OFFSET)."""
    dtype = like_ptr.dtype.element_ty
    normed = x * scale
    if FORM == 0:
        normed = normed.to(dtype).to(tl.float32)
    if FORM == 2:
        weight += 1.0
    return (normed * weight).to(dtype).to(tl.float32)


@triton.jit
def _rotate_halves(x1, x2, cos, sin, like_ptr):
    """Rotate both halves; each product is rounded before the addition, as by PyTorch's separate operations."""
    dtype = like_ptr.dtype.element_ty
    r1 = ((x1 * cos).to(dtype).to(tl.float32) - (x2 * sin).to(dtype).to(tl.float32)).to(dtype)
    r2 = ((x2 * cos).to(dtype).to(tl.float32) + (x1 * sin).to(dtype).to(tl.float32)).to(dtype)
    return r1, r2


@triton.jit
def _head_weights(q_weight_ptr, k_weight_ptr, is_q, dims, inside, HALF: tl.constexpr):
    """Both halves of each head's norm weight."""
    q1 = tl.load(q_weight_ptr + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    k1 = tl.load(k_weight_ptr + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    q2 = tl.load(q_weight_ptr + HALF + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    k2 = tl.load(k_weight_ptr + HALF + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    return tl.where(is_q, q1, k1), tl.where(is_q, q2, k2)


@triton.jit
def _wide_weights(
    q_weight_ptr, k_weight_ptr, heads, dims, inside, HEADS: tl.constexpr, BOTH: tl.constexpr, D: tl.constexpr
):
    """The columns `dims` of every head's norm weight, for norms over all heads of a token."""
    q_live = (heads < HEADS)[:, None] & inside[None, :]
    k_live = (heads >= HEADS)[:, None] & (heads < BOTH)[:, None] & inside[None, :]
    q = tl.load(q_weight_ptr + heads[:, None] * D + dims[None, :], mask=q_live, other=0.0)
    k = tl.load(k_weight_ptr + (heads - HEADS)[:, None] * D + dims[None, :], mask=k_live, other=0.0)
    return q.to(tl.float32) + k.to(tl.float32)


@triton.jit
def _put(
    q_ptr, k_ptr, x, heads, dims, inside, token, cell,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Store the columns `dims` of queries in their tensor and of keys in their cell."""
    there = inside[None, :]
    q_at = (token * HEADS + heads[:, None]) * D + dims[None, :]
    tl.store(q_ptr + q_at, x, mask=(heads < HEADS)[:, None] & there)
    head = heads - HEADS
    k_at = ((cell // PAGE * KV_HEADS + head[:, None]) * PAGE + cell % PAGE) * D + dims[None, :]
    if EIGHT:
        x = to_8_bits(x, KEY_FACTOR)
    tl.store(k_ptr + k_at, x, mask=(head >= 0)[:, None] & (head < KV_HEADS)[:, None] & there)


@triton.jit
def load_scaled(x_ptr, at, live, factor, dtype: tl.constexpr):
    """Load numbers of a product, apply the row's scale (1 if there is none), and round to the product's dtype."""
    return (tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32) * factor).to(dtype)


@triton.jit
def _rotate_store(
    qkv_ptr, factor_ptr, positions_ptr, cells_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_ptr, k_ptr, v_ptr,
    eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, VALUES: tl.constexpr, ACROSS: tl.constexpr,
    NORM: tl.constexpr, WIDE: tl.constexpr, FORM: tl.constexpr, SCALED: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    BOTH: tl.constexpr = HEADS + KV_HEADS
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    heads = tl.arange(0, TILE)
    dims = tl.arange(0, WIDTH)
    inside = dims < HALF
    position = tl.load(positions_ptr + token).to(tl.int64)
    cell = tl.load(cells_ptr + token).to(tl.int64)
    factor = 1.0
    if SCALED:
        factor = tl.load(factor_ptr + token)
    row = qkv_ptr + token * ((BOTH + KV_HEADS) * D)
    real = (heads < BOTH)[:, None]
    live = real & inside[None, :]
    at = heads[:, None] * D + dims[None, :]
    x1 = load_scaled(row, at, live, factor, dtype).to(tl.float32)
    x2 = load_scaled(row, at + HALF, live, factor, dtype).to(tl.float32)
    if NORM:
        if WIDE:
            squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
            of_q = tl.sum(tl.where(heads < HEADS, squares, 0.0), 0) / (HEADS * D)
            of_k = tl.sum(tl.where((heads >= HEADS) & (heads < BOTH), squares, 0.0), 0) / (KV_HEADS * D)
            scale = 1.0 / tl.sqrt(tl.where(heads < HEADS, of_q, of_k) + eps)
            w1 = _wide_weights(q_weight_ptr, k_weight_ptr, heads, dims, inside, HEADS, BOTH, D)
            w2 = _wide_weights(q_weight_ptr, k_weight_ptr, heads, dims + HALF, inside, HEADS, BOTH, D)
        else:
            scale = _inverse_rms(x1, x2, eps, D)
            w1, w2 = _head_weights(q_weight_ptr, k_weight_ptr, (heads < HEADS)[:, None], dims, inside, HALF)
        x1, x2 = scale_heads(x1, scale[:, None], w1, q_ptr, FORM), scale_heads(x2, scale[:, None], w2, q_ptr, FORM)
    cos = tl.load(cos_ptr + position * HALF + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    sin = tl.load(sin_ptr + position * HALF + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    r1, r2 = _rotate_halves(x1, x2, cos, sin, q_ptr)
    _put(q_ptr, k_ptr, r1, heads, dims, inside, token, cell, HEADS, KV_HEADS, D, PAGE, EIGHT)
    _put(q_ptr, k_ptr, r2, heads, dims + HALF, inside, token, cell, HEADS, KV_HEADS, D, PAGE, EIGHT)
    if REST > 0:  # the columns that are not rotated
        more = 2 * HALF + tl.arange(0, REST)
        there = more < D
        x3 = load_scaled(row, heads[:, None] * D + more[None, :], real & there[None, :], factor, dtype)
        _put(q_ptr, k_ptr, x3, heads, more, there, token, cell, HEADS, KV_HEADS, D, PAGE, EIGHT)
    # Values in a tile of their own, since their layout differs in 8 bits.
    owner = tl.arange(0, VALUES)[:, None]
    columns = tl.arange(0, ACROSS)[None, :]
    live = (owner < KV_HEADS) & (columns < D)
    v = load_scaled(row, (BOTH + owner) * D + columns, live, factor, dtype)
    v_at = ((cell // PAGE * KV_HEADS + owner) * PAGE + cell % PAGE) * D + columns
    if EIGHT:
        v = to_8_bits(v, VALUE_FACTOR)
        v_at = value_place(cell // PAGE, owner, cell % PAGE, columns, KV_HEADS, D, PAGE)
    tl.store(v_ptr + v_at, v, mask=live)


def _refuse_odd(dim: int, half: int, norms: HeadNorms | None) -> None:
    if dim != 2 * half and norms is not None:
        raise NotImplementedError("heads that are normed and rotated in part have no form here")


def rotate_store(
    product: Tensor | ScaledRows,
    positions: Tensor,
    cells: Tensor,
    cos: Tensor,
    sin: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotated queries [tokens, heads, dim]; rotated keys, and values, are stored at `cells` [tokens] of k and v.

    `positions` [tokens] index cos and sin [positions, dim / 2].
    """
    qkv, factor, scaled = parts_of(product)
    tokens = qkv.shape[0]
    kv_heads, page, dim = k.shape[1:]
    half = cos.shape[1]
    rest = dim - 2 * half
    _refuse_odd(dim, half, norms)
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps, form = norms if norms is not None else (qkv, qkv, 0.0, 0)
    _rotate_store[(tokens,)](
        qkv, factor, positions, cells, cos, sin, q_weight, k_weight, q, k, v, eps,
        HEADS=heads, KV_HEADS=kv_heads, D=dim, HALF=half, WIDTH=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(rest) if rest else 0, PAGE=page, TILE=triton.next_power_of_2(heads + kv_heads),
        VALUES=triton.next_power_of_2(kv_heads), ACROSS=triton.next_power_of_2(dim), NORM=norms is not None,
        WIDE=norms is not None and len(q_weight) != dim, FORM=form, SCALED=scaled, EIGHT=in_8_bits(k), num_warps=4,
    )  # fmt: skip
    return q


@triton.jit
def _store(
    x_ptr, cells_ptr, cache_ptr, stride_t, stride_h,
    KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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


def store(x: Tensor, cells: Tensor, cache: Tensor) -> None:
    """Store x [tokens, kv_heads, dim] in its cells [tokens] of a layer's cache."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    kv_heads, page, dim = cache.shape[1:]
    _store[(x.shape[0],)](
        x, cells, cache, x.stride(0), x.stride(1), KV_HEADS=kv_heads, D=dim, WIDTH=triton.next_power_of_2(dim),
        PAGE=page, TILE=triton.next_power_of_2(kv_heads),
    )  # fmt: skip


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, eps,
    X_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, HEADS: tl.constexpr, BOTH: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, WIDTH)
    inside = dims < HALF
    live = (heads < BOTH)[:, None] & inside[None, :]
    at = heads[:, None] * D + dims[None, :]
    x1 = tl.load(x_ptr + token * X_STRIDE + at, mask=live, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + token * X_STRIDE + at + HALF, mask=live, other=0.0).to(tl.float32)
    if NORM:
        scale = _inverse_rms(x1, x2, eps, D)
        w1, w2 = _head_weights(q_weight_ptr, k_weight_ptr, (heads < HEADS)[:, None], dims, inside, HALF)
        x1 = scale_heads(x1, scale[:, None], w1, out_ptr, FORM)
        x2 = scale_heads(x2, scale[:, None], w2, out_ptr, FORM)
    cos = tl.load(cos_ptr + token * HALF + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + dims, mask=inside, other=0.0)[None, :].to(tl.float32)
    r1, r2 = _rotate_halves(x1, x2, cos, sin, out_ptr)
    tl.store(out_ptr + token * OUT_STRIDE + at, r1, mask=live)
    tl.store(out_ptr + token * OUT_STRIDE + at + HALF, r2, mask=live)


_launch_rotate_heads = Launcher(_rotate_heads)


def rotate_heads(
    qkv: Tensor, rotation: Rotation, heads: int, kv_heads: int, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed if there are `norms`, then rotated, and values: views [tokens, heads, dim].

    Without norms they are rotated in place, as the backward pass does not need the product.
    """
    cos, sin = rotation
    tokens, half, both = len(qkv), cos.shape[1], heads + kv_heads
    dim = qkv.shape[1] // (both + kv_heads)
    _refuse_odd(dim, half, norms)
    out = qkv if norms is None else qkv.new_empty(tokens, both * dim)
    q_weight, k_weight, eps, form = norms if norms is not None else (qkv, qkv, 0.0, 0)
    tile = min(16, triton.next_power_of_2(both))
    width = triton.next_power_of_2(half)
    _launch_rotate_heads(
        (tokens, triton.cdiv(both, tile), 1),
        (qkv, out, cos, sin, q_weight, k_weight),
        (eps,),
        (qkv.shape[1], out.shape[1], heads, both, dim, half, width, tile, norms is not None, form),
        4,
    )
    shaped = out.view(tokens, -1, dim)
    return shaped[:, :heads], shaped[:, heads:both], qkv.view(tokens, -1, dim)[:, both:]


@triton.jit(do_not_specialize=["tokens"])
def _rotate_heads_backward(
    dq_ptr, dk_ptr, dv_ptr, raw_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, out_ptr, parts_ptr, tokens, eps,
    Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr, V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
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
    at = heads[:, None] * D + dims[None, :]
    q1 = tl.zeros([WIDTH], dtype=tl.float32)
    q2 = tl.zeros([WIDTH], dtype=tl.float32)
    k1 = tl.zeros([WIDTH], dtype=tl.float32)
    k2 = tl.zeros([WIDTH], dtype=tl.float32)
    if NORM:
        w1, w2 = _head_weights(q_weight_ptr, k_weight_ptr, is_q, dims, inside, HALF)
        if FORM == 2:
            w1 += 1.0
            w2 += 1.0
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
            x1 = tl.load(raw_ptr + token * (ALL * D) + at, mask=live, other=0.0).to(tl.float32)
            x2 = tl.load(raw_ptr + token * (ALL * D) + at + HALF, mask=live, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
            n1, n2 = x1 * scale, x2 * scale
            if WEIGHT:
                s1, s2 = r1 * n1, r2 * n2
                if FORM == 0:
                    s1, s2 = r1 * n1.to(dtype).to(tl.float32), r2 * n2.to(dtype).to(tl.float32)
                q1 += tl.sum(tl.where(is_q, s1, 0.0), 0)
                q2 += tl.sum(tl.where(is_q, s2, 0.0), 0)
                k1 += tl.sum(tl.where(k_live, s1, 0.0), 0)
                k2 += tl.sum(tl.where(k_live, s2, 0.0), 0)
            g1, g2 = r1 * w1, r2 * w2
            mean = ((tl.sum(g1 * n1, 1) + tl.sum(g2 * n2, 1)) / D)[:, None]
            r1 = tl.where(is_v, r1, (g1 - n1 * mean) * scale)
            r2 = tl.where(is_v, r2, (g2 - n2 * mean) * scale)
        tl.store(out_ptr + token * (ALL * D) + at, r1.to(dtype), mask=live)
        tl.store(out_ptr + token * (ALL * D) + at + HALF, r2.to(dtype), mask=live)
        token += tl.num_programs(0)
    if WEIGHT:
        part = parts_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (4 * HALF) + dims
        tl.store(part, q1, mask=inside)
        tl.store(part + HALF, q2, mask=inside)
        tl.store(part + 2 * HALF, k1, mask=inside)
        tl.store(part + 3 * HALF, k2, mask=inside)


_launch_rotate_heads_backward = Launcher(_rotate_heads_backward)


def rotate_heads_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    rotation: Rotation,
    raw: Tensor | None,
    norms: HeadNorms | None,
    wants_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient of the joined product, and of the norms' weights, from those of the results of `rotate_heads`.

    `raw`: the product itself, if there are norms.
    """
    cos, sin = rotation
    dq, dk, dv = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk, dv))
    (tokens, heads, dim), kv_heads = dq.shape, dk.shape[1]
    whole, half = heads + 2 * kv_heads, cos.shape[1]
    _refuse_odd(dim, half, norms)
    out = torch.empty(tokens, whole * dim, dtype=dq.dtype, device=dq.device)
    tile = min(16, triton.next_power_of_2(whole))
    programs, tiles, parts = tokens, triton.cdiv(whole, tile), out
    if wants_weight:
        programs = min(tokens, processors(dq.device) * 8)
        parts = torch.empty(programs * tiles, 2, dim, dtype=torch.float32, device=dq.device)
    q_weight, k_weight, eps, form = norms if norms is not None else (out, out, 0.0, 0)
    width = triton.next_power_of_2(half)
    _launch_rotate_heads_backward(
        (programs, tiles, 1),
        (dq, dk, dv, out if raw is None else raw, cos, sin, q_weight, k_weight, out, parts),
        (tokens, eps),
        (
            *(dq.stride(0), dq.stride(1), dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1)),
            *(heads, kv_heads, dim, half, width, tile, norms is not None, wants_weight, form),
        ),
        4,
    )
    if dim > 2 * half:  # gradients of columns that are not rotated
        rest = out.view(tokens, whole, dim)[..., 2 * half :]
        rest.copy_(torch.cat([d[..., 2 * half :] for d in (dq, dk, dv)], 1))
    if not wants_weight:
        return out, None, None
    of_q, of_k = parts.sum(0)
    return out, of_q.to(q_weight.dtype), of_k.to(k_weight.dtype)
