"""The functions of `block` in PyTorch's own operations: for the CPU."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from upshot.engine.llama.blocks import rotate

Turn = tuple[torch.Tensor, torch.Tensor]
HeadNorms = tuple[torch.Tensor, torch.Tensor, float]


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of x + residual, and x + residual itself."""
    summed = x if residual is None else x + residual
    return _norm(summed, weight, eps), summed


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * _normed(x, eps)[0].to(x.dtype)


def _normed(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows without their weight, float32, and what they were multiplied by."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * scale, scale


def _norm_derivative(
    d: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the rows (float32), and the rows without their weight."""
    normed, scale = _normed(x, eps)
    inner = d.float() * weight.float()
    mean = (inner * normed).mean(-1, keepdim=True)
    return inner.addcmul_(normed, mean, value=-1).mul_(scale), normed.to(x.dtype)


def _weight_gradient(d: torch.Tensor, normed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (d.float() * normed.float()).flatten(0, -2).sum(0).to(weight.dtype)


def norm_backward(
    dx: torch.Tensor,
    summed: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    wants_weight: bool,
    again: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `block.norm_backward`."""
    d, normed = _norm_derivative(dx, summed, weight, eps)
    dweight = _weight_gradient(dx, normed, weight) if wants_weight else None
    if again:
        torch.mul(normed, weight, out=dx)
    return (d if residual is None else d.add_(residual)).to(summed.dtype), dweight


def gate(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) × second half."""
    first, second = x.chunk(2, -1)
    return F.silu(first).mul_(second)


def gate_backward(x: torch.Tensor, d: torch.Tensor, again: bool) -> torch.Tensor:
    """See `block.gate_backward`."""
    first, second = x.chunk(2, -1)
    out = torch.empty_like(x)
    of_first, of_second = out.chunk(2, -1)
    act = F.silu(first)
    torch.mul(d, act, out=of_second)
    torch.ops.aten.silu_backward.grad_input(d * second, first, grad_input=of_first)
    if again:
        torch.mul(act, second, out=d)
    return out


def turn(
    qkv: torch.Tensor, turn: Turn, heads: int, kv_heads: int, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys (normed if `norms`) rotated, and values, [tokens, heads, dim]."""
    cos, sin = _whole(turn)
    q, k, v = qkv.view(len(qkv), -1, cos.shape[-1]).split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = _norm(q, norms[0], norms[2]), _norm(k, norms[1], norms[2])
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def turn_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    turn: Turn,
    raw: torch.Tensor | None,
    norms: HeadNorms | None,
    wants_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See `block.turn_backward`."""
    cos, sin = _whole(turn)
    dq, dk = rotate(dq, cos, -sin), rotate(dk, cos, -sin)
    sums: list[torch.Tensor | None] = [None, None]
    if norms is not None:
        assert raw is not None
        q, k, _ = raw.view(len(raw), -1, dq.shape[-1]).split([dq.shape[1], dk.shape[1], dv.shape[1]], 1)
        (to_q, q), (to_k, k) = _norm_derivative(dq, q, norms[0], norms[2]), _norm_derivative(dk, k, norms[1], norms[2])
        if wants_weight:
            sums = [_weight_gradient(dq, q, norms[0]), _weight_gradient(dk, k, norms[1])]
        dq, dk = to_q, to_k
    out = torch.cat([dq.to(dv.dtype), dk.to(dv.dtype), dv], 1).flatten(1)
    return out, sums[0], sums[1]


def _whole(turn: Turn) -> Turn:
    """cos and sin [tokens, 1, dim] from those of half the dimensions."""
    cos, sin = (torch.cat([x, x], -1)[:, None] for x in turn)
    return cos, sin
