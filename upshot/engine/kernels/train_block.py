"""What lies between the matrix products of a Llama block, and its derivatives; `plain` has the same for the CPU.

The forward rounds where transformers and the engine round; norm and gate are the engine's own kernels. Sums are
float32. The derivatives compute again what the forward had between its products (the normed input, the gated product)
and write it over the gradient they were given, so that nothing of it is kept from the forward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from upshot.engine.kernels import block as engine
from upshot.engine.kernels.decode import processors
from upshot.engine.kernels.launch import Launcher
from upshot.engine.kernels.rotary import turn, turn_backward

__all__ = ["add_norm", "gate", "gate_backward", "norm_backward", "turn", "turn_backward"]

_launch_norm = Launcher(engine._add_norm)
_launch_gate = Launcher(engine._gate)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of x + residual, and x + residual itself."""
    rows, n = x.shape
    out = torch.empty_like(x)
    summed = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(n)
    _launch_norm(
        (rows, 1, 1),
        (x, x if residual is None else residual, weight, out, summed),
        (rows, eps),
        (n, block, residual is not None, 1),
        4 if block < 2048 else 8,
    )
    return out, summed


def gate(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) × second half."""
    rows, n = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, n)
    block = min(2048, triton.next_power_of_2(n))
    _launch_gate((rows, triton.cdiv(n, block), 1), (x, out), (), (n, block), 4)
    return out


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    dx_ptr,
    sum_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    rows,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    AGAIN: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    live = cols < N
    dtype = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + cols, mask=live, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    at = tl.program_id(0).to(tl.int64) * N + cols
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(sum_ptr + at, mask=live, other=0.0).to(tl.float32)
        dx = tl.load(dx_ptr + at, mask=live, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
        normed = x * scale
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
    dx: torch.Tensor,
    summed: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    wants_weight: bool,
    again: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of the sum (with what comes to it past the norm) and of the weight, from that of the normed rows.

    `again`: the normed rows are written over their gradient.
    """
    rows, n = summed.shape
    out = torch.empty_like(summed)
    block = triton.next_power_of_2(n)
    programs, parts = rows, out
    if wants_weight:
        programs = min(rows, processors(dx.device) * (8 if block < 2048 else 4))
        parts = torch.empty(programs, n, dtype=torch.float32, device=dx.device)
    _launch_norm_backward(
        (programs, 1, 1),
        (dx, summed, weight, out if residual is None else residual, out, parts),
        (rows, eps),
        (n, block, residual is not None, again, wants_weight),
        4 if block < 2048 else 8,
    )
    return out, parts.sum(0).to(weight.dtype) if wants_weight else None


@triton.jit
def _gate_backward(x_ptr, d_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, AGAIN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < N
    dtype = out_ptr.dtype.element_ty
    at = row * 2 * N + cols
    gate = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + at + N, mask=live, other=0.0).to(tl.float32)
    d = tl.load(d_ptr + row * N + cols, mask=live, other=0.0).to(tl.float32)
    below = 1.0 + tl.exp(-gate)
    share = 1.0 / below
    act = (gate / below).to(dtype).to(tl.float32)
    tl.store(out_ptr + at, (d * up * share * (1.0 + gate * (1.0 - share))).to(dtype), mask=live)
    tl.store(out_ptr + at + N, (d * act).to(dtype), mask=live)
    if AGAIN:
        tl.store(d_ptr + row * N + cols, (act * up).to(dtype), mask=live)


_launch_gate_backward = Launcher(_gate_backward)


def gate_backward(x: torch.Tensor, d: torch.Tensor, again: bool) -> torch.Tensor:
    """The gradient of gate and up side by side, from that of `gate`; `again`: the product is written over `d`."""
    rows, n = d.shape
    out = torch.empty_like(x)
    block = min(1024, triton.next_power_of_2(n))
    _launch_gate_backward((rows, triton.cdiv(n, block), 1), (x, d, out), (), (n, block, again), 4)
    return out
