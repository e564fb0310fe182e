"""The learner's attention in exact mode: the engine's own, over the batch's keys and values instead of pages.

The forward is what the engine computes; the backward pass goes through PyTorch's attention on the same inputs.
Padding must be on the right: it is never looked at, because every query sees only what comes before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from upshot.engine.exact import blocks

NAME = "upshot_exact"
kernels_in_use: list[bool] = []
"""One entry for each `ExactForward.attention` under way: whether it uses the GPU's kernels."""


def attend_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float, kernels: bool
) -> torch.Tensor:
    """Causal attention of [rows, heads, length, dim], computed as the engine does; [rows, length, heads, dim]."""
    rows, heads, length, dim = q.shape
    packed = q.transpose(1, 2).reshape(rows * length, heads, dim)
    if kernels:
        from upshot.engine.kernels import exact

        table = torch.arange(rows, dtype=torch.int32, device=q.device)[:, None]
        first = torch.arange(0, length, exact.QUERIES, dtype=torch.int32, device=q.device).repeat(rows, 1)
        each = torch.stack(
            [table.expand_as(first), table * length + first, (length - first).clamp(max=exact.QUERIES), first]
        )
        out = exact.attend(packed, k, v, table, each.view(4, -1), scale, window, softcap)
    else:
        spare = -length % blocks.KEYS
        cells = F.pad(torch.arange(rows * length).view(rows, length), (0, spare))
        counts = torch.full((rows,), length)
        keys, values = (x.transpose(1, 2).reshape(rows * length, -1, dim) for x in (k, v))
        tiles = blocks.tiles_of(torch.zeros_like(counts), counts, cells)
        out = blocks.attend(packed, keys, values, tiles, scale, window, softcap)
    return out.view(rows, length, heads, dim)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float) -> torch.Tensor:
    """The same by PyTorch's attention, for the backward pass."""
    length = q.shape[2]
    if not window and not softcap:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)
    back = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    seen = (back >= 0) & (back < window) if window else back >= 0
    if not softcap:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=gqa).transpose(1, 2)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.tanh((q @ k.transpose(-1, -2)).float() * (scale / softcap)) * softcap
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype) @ v).transpose(1, 2)


class ExactAttention(torch.autograd.Function):
    """Exact forward, plain backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, scale: float, window: int, softcap: float) -> torch.Tensor:
        """Attention as the engine computes it."""
        ctx.save_for_backward(q, k, v)
        ctx.options = (scale, window, softcap)
        with _disable_current_modes():
            return attend_batch(q, k, v, scale, window, softcap, kernels_in_use[-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Gradients of PyTorch's attention."""
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = plain(*inputs, *ctx.options)
        return (*torch.autograd.grad(out, inputs, grad), None, None, None)


def exact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, in the form transformers calls."""
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention sinks (s_aux) have no exact form")
    if dropout:
        raise NotImplementedError(f"attention dropout ({dropout}) has no exact form")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return ExactAttention.apply(query, key, value, scale, sliding_window or 0, softcap or 0.0), None
