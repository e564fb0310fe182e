"""Residual addition with RMS norm, and its backward pass: one kernel each for engine and learner, one program per row.

`add_norm` is all that happens between two matrix products of a block in any family: the output's own norm (Gemma,
OLMo 2) and factor (Granite), the residual addition, and the norm before the next product. If that product is in 8 bits
(fp8.py), the row is quantized, too, since the program has all of it.

Kernels round where transformers rounds (each operation's result in the model's dtype), so that sampler and learner
agree; sums are float32. The backward pass computes the normed rows again and may write them over their gradient, so the
forward need not keep them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from upshot.engine.kernels.fp8 import ScaledRows, empty_rows8, parts_of, store_row
from upshot.engine.kernels.launch import Launcher, processors
from upshot.engine.kernels.plain import EARLY


@triton.jit
def _norm_row(x, weight_ptr, cols, live, eps, dtype: tl.constexpr, N: tl.constexpr, FORM: tl.constexpr):
    """The norm of row x, rounded to `dtype` by its form (plain.EARLY, LATE, OFFSET)."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
    weight = tl.load(weight_ptr + cols, mask=live, other=0.0).to(tl.float32)
    if FORM == 0:
        normed = (x * scale).to(dtype).to(tl.float32)
    else:
        normed = x * scale
        if FORM == 2:
            weight += 1.0
    return (normed * weight).to(dtype)


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    x_ptr, x_scale_ptr, residual_ptr, weight_ptr, after_ptr, sum_ptr, out_ptr, scale_ptr, rows, eps, factor,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr, FORM: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, FACTOR: tl.constexpr, SCALED: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    live = cols < N
    dtype = sum_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * N + cols, mask=live, other=0.0).to(tl.float32)
    if PARTS > 1:
        # Partial sums of a split-K product (llama/fused.project_out): add them in float32 and round once.
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + (part * rows + row) * N + cols, mask=live, other=0.0)
        x = x.to(dtype).to(tl.float32)
    if SCALED:
        x *= tl.load(x_scale_ptr + row)
    if AFTER:
        x = _norm_row(x, after_ptr, cols, live, eps, dtype, N, FORM).to(tl.float32)
    if FACTOR:
        x = (x * factor).to(dtype).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * N + cols, mask=live, other=0.0).to(tl.float32)
        x += residual
        tl.store(sum_ptr + row * N + cols, x.to(dtype), mask=live)
        if not NARROW:
            x = x.to(dtype).to(tl.float32)
    if BEFORE:
        if NARROW:  # no rounding to 16 bits before, as in gate.py
            normed = _norm_row(x, weight_ptr, cols, live, eps, tl.float32, N, FORM)
            store_row(normed, row, cols, live, out_ptr, scale_ptr, N)
        else:
            normed = _norm_row(x, weight_ptr, cols, live, eps, dtype, N, FORM)
            tl.store(out_ptr + row * N + cols, normed, mask=live)


_launch_add_norm = Launcher(_add_norm)


def add_norm(
    x: Tensor | ScaledRows,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    form: int = EARLY,
    after: Tensor | None = None,
    factor: float = 1.0,
    narrow: bool = False,
) -> tuple[Any, Tensor]:
    """See `plain.add_norm`. x may be float32 partial sums [parts, rows, n]; `narrow`: the normed rows in 8 bits."""
    x, x_scale, scaled = parts_of(x)
    if residual is None and weight is None:
        return x, x
    rows, n = x.shape[-2:]
    parts = x.shape[0] if x.dim() == 3 else 1
    like = x if residual is None else residual  # partial sums do not have the model's dtype
    summed = x if residual is None else torch.empty(rows, n, dtype=like.dtype, device=x.device)
    out: Tensor | ScaledRows = summed if weight is None else torch.empty(rows, n, dtype=like.dtype, device=x.device)
    if narrow:
        out = empty_rows8(rows, n, x.device)
    written = out if isinstance(out, ScaledRows) else (out, like)
    block = triton.next_power_of_2(n)
    kinds = (weight is not None, after is not None, factor != 1.0, scaled, narrow)
    _launch_add_norm(
        (rows, 1, 1),
        (x, x_scale, like, like if weight is None else weight, like if after is None else after, summed, *written),
        (rows, eps, factor),
        (n, block, residual is not None, parts, form, *kinds),
        # With 16, a row of 4,096 numbers in 8 bits is stored without an exchange between threads.
        4 if block < 2048 else 16 if parts > 1 or (narrow and block >= 4096) else 8,
    )
    return out, summed


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    dx_ptr, sum_ptr, weight_ptr, residual_ptr, out_ptr, parts_ptr, rows, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, AGAIN: tl.constexpr, WEIGHT: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    live = cols < N
    dtype = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + cols, mask=live, other=0.0).to(tl.float32)
    if FORM == 2:
        weight += 1.0
    total = tl.zeros([BLOCK], dtype=tl.float32)
    at = tl.program_id(0).to(tl.int64) * N + cols
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(sum_ptr + at, mask=live, other=0.0).to(tl.float32)
        dx = tl.load(dx_ptr + at, mask=live, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
        normed = x * scale
        rounded = normed
        if FORM == 0:
            rounded = normed.to(dtype).to(tl.float32)
        if WEIGHT:
            total += dx * rounded
        if AGAIN:
            tl.store(dx_ptr + at, (rounded * weight).to(dtype), mask=live)
        dx = dx * weight
        mean = tl.sum(dx * normed, 0) / N
        dx = (dx - normed * mean) * scale
        if RESIDUAL:
            dx += tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, dx.to(dtype), mask=live)
        at += tl.num_programs(0) * N
    if WEIGHT:
        tl.store(parts_ptr + tl.program_id(0) * N + cols, total, mask=live)


_launch_norm_backward = Launcher(_norm_backward)


def norm_backward(
    dx: Tensor,
    summed: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    wants_weight: bool,
    again: bool,
    form: int = EARLY,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `summed` [rows, n] and of the weight, from the gradient `dx` of the normed rows.

    `residual`: the gradient that reaches the sum past the norm, which is added. `again`: overwrite `dx` with the normed
    rows.
    """
    rows, n = summed.shape
    out = torch.empty_like(summed)
    block = triton.next_power_of_2(n)
    programs, parts = rows, out
    if wants_weight:
        # Few programs with many rows each: each sums the weight's gradient over its rows, and these sums are added in a
        # fixed order. Atomics would round differently each time.
        programs = min(rows, processors(dx.device) * (8 if block < 2048 else 4))
        parts = torch.empty(programs, n, dtype=torch.float32, device=dx.device)
    _launch_norm_backward(
        (programs, 1, 1),
        (dx, summed, weight, out if residual is None else residual, out, parts),
        (rows, eps),
        (n, block, residual is not None, again, wants_weight, form),
        4 if block < 2048 else 8,
    )
    return out, parts.sum(0).to(weight.dtype) if wants_weight else None
