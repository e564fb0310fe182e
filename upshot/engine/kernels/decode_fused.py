"""Decode attention straight from the qkv product: one kernel rotates, stores the new key and value, and attends.

For decode steps without a plan (rows share nothing and are read whole), and heads that `can_fuse` takes: each program
computes one row and one key head, so no other program needs the new key. With pieces, other programs would have to wait
for it; those steps rotate and store first (rotary.rotate_store), then call decode.py. Both round alike, so a sequence
may alternate between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from upshot.engine.kernels.decode import add_sinks, attend, tune
from upshot.engine.kernels.fp8 import ScaledRows, parts_of
from upshot.engine.kernels.kv8 import KEY_FACTOR, VALUE_FACTOR, in_8_bits, to_8_bits, value_place
from upshot.engine.kernels.plain import AttentionOptions, HeadNorms
from upshot.engine.kernels.rotary import load_scaled, scale_heads


@triton.jit
def _rotate_rows(
    x_ptr, factor, at, live, weight_ptr, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """The heads of the qkv product at offsets `at`, normed if NORM, rotated."""
    HALF: tl.constexpr = D // 2
    dims = tl.arange(0, D)
    # The other half of each head is loaded again (from the L1 cache): attention needs whole heads, and joining two
    # halves that were rotated separately would cost more.
    others = (dims + HALF) % D
    dtype = x_ptr.dtype.element_ty
    x = load_scaled(x_ptr, at + dims[None, :], live, factor, dtype).to(tl.float32)
    y = load_scaled(x_ptr, at + others[None, :], live, factor, dtype).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        w = tl.load(weight_ptr + dims)[None, :].to(tl.float32)
        u = tl.load(weight_ptr + others)[None, :].to(tl.float32)
        x, y = scale_heads(x, scale, w, x_ptr, FORM), scale_heads(y, scale, u, x_ptr, FORM)
    y = tl.where((dims < HALF)[None, :], -y, y)
    return ((x * cos).to(dtype).to(tl.float32) + (y * sin).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _fused_rows(
    qkv_ptr, factor_ptr, k_ptr, v_ptr, out_ptr, table_ptr, slots_ptr, lengths_ptr, cos_ptr, sin_ptr, q_weight_ptr,
    k_weight_ptr, sinks_ptr, table_stride, scale, softcap, window, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PAIR: tl.constexpr, WINDOW: tl.constexpr, NORM: tl.constexpr,
    FORM: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, EIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    head = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(lengths_ptr + row) - 1
    table_row = table_ptr + slot * table_stride
    lanes = tl.arange(0, TILE)
    dims = tl.arange(0, D)
    real = lanes < GROUP
    cos = tl.load(cos_ptr + position * (D // 2) + dims % (D // 2))[None, :].to(tl.float32)
    sin = tl.load(sin_ptr + position * (D // 2) + dims % (D // 2))[None, :].to(tl.float32)
    base = row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D)
    factor = 1.0
    if SCALED:
        factor = tl.load(factor_ptr + row)
    at = base + (head * GROUP + lanes)[:, None] * D
    q = _rotate_rows(qkv_ptr, factor, at, real[:, None], q_weight_ptr, cos, sin, eps, D, NORM, FORM)
    key_at = base + (HEADS + head) * D + tl.arange(0, 1)[:, None]
    k_new = _rotate_rows(qkv_ptr, factor, key_at, key_at >= 0, k_weight_ptr, cos, sin, eps, D, NORM, FORM)
    v_at = base + (HEADS + KV_HEADS + head) * D + dims[None, :]
    v_new = load_scaled(qkv_ptr, v_at, v_at >= 0, factor, qkv_ptr.dtype.element_ty)
    own_page = tl.load(table_row + position // PAGE).to(tl.int64)
    own_cell = ((own_page * KV_HEADS + head) * PAGE + position % PAGE) * D + dims[None, :]
    if EIGHT:  # attend to the rounded ones, as the next steps will
        k_8, v_8 = to_8_bits(k_new, KEY_FACTOR), to_8_bits(v_new, VALUE_FACTOR)
        tl.store(k_ptr + own_cell, k_8)
        tl.store(v_ptr + value_place(own_page, head, position % PAGE, dims[None, :], KV_HEADS, D, PAGE), v_8)
        k_new, v_new = k_8.to(tl.float32), v_8.to(tl.float32) / VALUE_FACTOR
    else:
        tl.store(k_ptr + own_cell, k_new)
        tl.store(v_ptr + own_cell, v_new)
    # The new key is used from registers, the others from pages, so no barrier is needed between its store and a load.
    # The running maximum starts with its score, the sum of weights with 1, the result with its value.
    m = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1)
    if SOFTCAP:
        m = softcap * LOG2E * (1.0 - 2.0 / (tl.exp(2.0 * m * scale / softcap) + 1.0))
    else:
        m = m * (scale * LOG2E)
    z = tl.full([TILE], 1.0, dtype=tl.float32)
    acc = tl.zeros([TILE, D], dtype=tl.float32) + v_new.to(tl.float32)
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, position + 1 - window) // PAGE * PAGE
    first = position + 1 - window + lanes * 0
    acc, m, z = attend(
        q, acc, m, z, k_ptr, v_ptr, table_row, head, begin, position, first, scale, softcap,
        KV_HEADS, D, D, PAGE, BLOCK_N, PAIR, WINDOW, SOFTCAP, EIGHT, STAGES,
    )  # fmt: skip
    if SINKS:
        z = add_sinks(z, m, sinks_ptr, head * GROUP + lanes, real)
    query = (row.to(tl.int64) * HEADS + head * GROUP + lanes)[:, None] * D + dims[None, :]
    tl.store(out_ptr + query, (acc / z[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])


def can_fuse(dim: int, cos: Tensor, norms: HeadNorms | None) -> bool:
    """Whether the fused kernel takes these heads: 16, 32, 64 … wide, rotated whole, with norms per head or none."""
    return dim >= 16 and dim.bit_count() == 1 and 2 * cos.shape[1] == dim and (norms is None or len(norms.q) == dim)


def fused_decode_attention(
    product: Tensor | ScaledRows,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    options: AttentionOptions,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Attention [rows, heads, dim] of each row's new token (position length - 1), from the joined qkv product."""
    qkv, factor, scaled = parts_of(product)
    rows, (scale, window, softcap, sinks, _) = qkv.shape[0], options
    kv_heads, page, dim = k.shape[1:]
    out = torch.empty(rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps, form = norms if norms is not None else (qkv, qkv, 0.0, 0)
    tuning = tune(kv_heads * rows, k)
    _fused_rows[(kv_heads, rows)](
        qkv, factor, k, v, out, table, slots, lengths, cos, sin, q_weight, k_weight,
        qkv if sinks is None else sinks, table.stride(0), scale, softcap, window, eps, HEADS=heads, KV_HEADS=kv_heads,
        GROUP=heads // kv_heads, TILE=max(16, triton.next_power_of_2(heads // kv_heads)), D=dim, PAGE=page,
        BLOCK_N=tuning.block, PAIR=tuning.pair, WINDOW=window > 0, NORM=norms is not None, FORM=form,
        SOFTCAP=softcap > 0, SINKS=sinks is not None, SCALED=scaled, EIGHT=in_8_bits(k), STAGES=tuning.stages,
        num_warps=tuning.warps,
    )  # fmt: skip
    return out
