"""The kernels' functions in PyTorch: used on the CPU by engine and learner, and the reference in the kernels' tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Rotation = tuple[Tensor, Tensor]
"""cos and sin of each token, [tokens, dim / 2]; fewer columns if only the first part of each head is rotated."""
EARLY, LATE, OFFSET = 0, 1, 2
"""When a norm rounds to the model's dtype: before its weight (Llama), after it (OLMo 2), after 1 + weight (Gemma)."""
SILU, GELU = 0, 1
"""The MLP's activation; GELU is the tanh approximation."""


class HeadNorms(NamedTuple):
    """The norms of queries and keys; weights are [dim], or [heads × dim] if all heads are normed together (OLMo 2)."""

    q: Tensor
    k: Tensor
    eps: float
    form: int = EARLY


class AttentionOptions(NamedTuple):
    """The settings of one layer's attention."""

    scale: float
    """Factor on the scores."""
    window: int = 0
    """Sliding window: a query sees this many tokens, itself included; 0: all."""
    softcap: float = 0.0
    """Soft cap of the scores (Gemma 2); 0: none."""
    sinks: Tensor | None = None
    """[heads] Scores of an extra key without a value, which every query sees (GPT-OSS)."""
    dropout: float = 0.0

    def is_plain(self, longest: int) -> bool:
        """Whether this is plain causal attention for sequences of up to `longest` tokens."""
        return not (0 < self.window < longest or self.softcap or self.dropout) and self.sinks is None


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    form: int = EARLY,
    after: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """x + residual, RMS-normed by `weight` (None: not), and x + residual itself, [rows, n] both.

    `after`: the weight of a norm of x before the sum. `factor`: multiplies x after that norm.
    """
    if after is not None:
        x = norm(x, after, eps, form)
    if factor != 1.0:
        x = x * factor
    summed = x if residual is None else x + residual
    return summed if weight is None else norm(summed, weight, eps, form), summed


def norm(x: Tensor, weight: Tensor, eps: float, form: int = EARLY) -> Tensor:
    """RMS norm over the last dimension, in float32, rounded where transformers rounds."""
    if form == OFFSET:
        weight = 1.0 + weight.float()
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    if form == EARLY:
        return weight * _without_weight(x, eps)[0].to(x.dtype)
    return (_without_weight(x, eps)[0] * weight).to(x.dtype)


def norm_heads(x: Tensor, weight: Tensor, eps: float, form: int = EARLY) -> Tensor:
    """RMS norm of each head of x [tokens, heads, dim], or of all heads of a token, by the length of the weight."""
    rows = x if len(weight) == x.shape[-1] else x.flatten(1)
    return norm(rows, weight, eps, form).view(x.shape)


def _without_weight(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normed rows before the weight, float32, and the factor [rows, 1] by which they were multiplied."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * scale, scale


def _norm_derivative(
    d: Tensor, x: Tensor, weight: Tensor, eps: float, form: int, wants_weight: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows' gradient (float32), the normed rows before the weight, and if wanted the weight's gradient."""
    normed, scale = _without_weight(x, eps)
    inner = d.float() * (weight.float() + 1.0 if form == OFFSET else weight.float())
    mean = (inner * normed).mean(-1, keepdim=True)
    rounded = normed.to(x.dtype) if form == EARLY else normed
    dweight = (d.float() * rounded.float()).flatten(0, -2).sum(0).to(weight.dtype) if wants_weight else None
    return inner.addcmul_(normed, mean, value=-1).mul_(scale), rounded, dweight


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
    """See `norm.norm_backward`."""
    d, normed, dweight = _norm_derivative(dx, summed, weight, eps, form, wants_weight)
    if again:
        dx.copy_(normed * (weight.float() + 1.0 if form == OFFSET else weight))
    return (d if residual is None else d.add_(residual)).to(summed.dtype), dweight


def gate(x: Tensor, act: int = SILU) -> Tensor:
    """silu (or gelu) of the first half of x [rows, 2n], times the second half."""
    first, second = x.chunk(2, -1)
    return (F.silu(first) if act == SILU else F.gelu(first, approximate="tanh")).mul_(second)


def gate_backward(x: Tensor, d: Tensor, again: bool, act: int = SILU) -> Tensor:
    """See `gate.gate_backward`."""
    first, second = x.chunk(2, -1)
    if act == SILU:
        active, slope = F.silu(first), torch.ops.aten.silu_backward(d * second, first)
    else:
        active = F.gelu(first, approximate="tanh")
        slope = torch.ops.aten.gelu_backward(d * second, first, approximate="tanh")
    first.copy_(slope)
    product = active * second if again else d
    torch.mul(d, active, out=second)
    if again:
        d.copy_(product)
    return x


def rotate_heads(
    qkv: Tensor, rotation: Rotation, heads: int, kv_heads: int, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed if there are `norms`, then rotated, and values; [tokens, heads, dim] each."""
    cos, sin = _whole(rotation)
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, -1).split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = norm(q, norms.q, norms.eps, norms.form), norm(k, norms.k, norms.eps, norms.form)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def rotate_heads_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    rotation: Rotation,
    raw: Tensor | None,
    norms: HeadNorms | None,
    wants_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `rotary.rotate_heads_backward`."""
    cos, sin = _whole(rotation)
    dq, dk = rotate(dq, cos, -sin), rotate(dk, cos, -sin)
    to_q_weight = to_k_weight = None
    if norms is not None:
        assert raw is not None
        q, k, _ = raw.view(len(raw), -1, dq.shape[-1]).split([dq.shape[1], dk.shape[1], dv.shape[1]], 1)
        dq, _, to_q_weight = _norm_derivative(dq, q, norms.q, norms.eps, norms.form, wants_weight)
        dk, _, to_k_weight = _norm_derivative(dk, k, norms.k, norms.eps, norms.form, wants_weight)
    out = torch.cat([dq.to(dv.dtype), dk.to(dv.dtype), dv], 1).flatten(1)
    return out, to_q_weight, to_k_weight


def _whole(rotation: Rotation) -> Rotation:
    """cos and sin [tokens, 1, dim] from those of half a head."""
    cos, sin = rotation
    return torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [tokens, heads, dim]; cos, sin [tokens, 1, dim], or of the first dimensions only."""
    if cos.shape[-1] < x.shape[-1]:
        rotated, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
        return torch.cat([rotate(rotated, cos, sin), rest], -1)
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def finish_logits(logits: Tensor, divisor: float, cap: float) -> Tensor:
    """Divide logits (1: not) and soft-cap them (0: not), in place, rounding after each operation."""
    if divisor != 1.0:
        logits = logits.div_(divisor)
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def cap_logits(z: Tensor, cap: float) -> Tensor:
    """Soft-capped logits; 0: no cap."""
    return cap * torch.tanh(z / cap) if cap else z


def token_logprobs(
    logits: Tensor, targets: Tensor, inverse: float, cap: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, log-sum-exps and entropies (zeros unless asked for), [rows] each.

    For logits [rows, vocab]; `inverse`: 1 / temperature; `cap`: soft cap, 0: none.
    """
    z = cap_logits(logits.float(), cap) * inverse
    sums = z.logsumexp(-1)
    logprobs = z.gather(-1, targets[:, None])[:, 0] - sums
    spread = sums - ((z - sums[:, None]).exp() * z).sum(-1) if entropy else torch.zeros_like(sums)
    return logprobs, sums, spread


def token_logprobs_backward(
    logits: Tensor,
    targets: Tensor,
    sums: Tensor,
    entropy: Tensor,
    grads: Tensor,
    entropy_grads: Tensor | None,
    inverse: float,
    cap: float,
) -> None:
    """Overwrite logits with their gradients; see `logprobs.token_logprobs_backward`."""
    z = cap_logits(logits.float(), cap)
    logp = z * inverse - sums[:, None]
    p = logp.exp()
    out = p * -grads[:, None]
    out.scatter_add_(-1, targets[:, None], grads[:, None])
    if entropy_grads is not None:
        out -= entropy_grads[:, None] * p * (logp + entropy[:, None])
    if cap:
        out *= 1 - (z / cap).square()
    logits.copy_(out.mul_(inverse))


def choose_attention_without_cudnn() -> None:
    """Keep PyTorch from choosing cuDNN's attention, for the rest of the process.

    PyTorch 2.11 prefers it on Hopper GPUs, where its gradients with a mask can be NaN (pytorch issue 196678). long.py
    calls it explicitly, for shapes that we checked.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def attention(q: Tensor, k: Tensor, v: Tensor, back: Tensor | None, options: AttentionOptions) -> Tensor:
    """Attention of [rows, heads, queries, dim] to keys [rows, kv_heads, keys, dim], differentiable.

    `back` [rows, queries, keys]: how many tokens a key is before the query; negative if the query must not see it.
    None: query i and key i have the same position, so the plain causal mask applies.
    """
    scale, window, softcap, _, dropout = options
    gqa = q.shape[1] != k.shape[1]
    if back is None and not window and not softcap:
        return F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True, scale=scale, enable_gqa=gqa)
    if back is None:
        every = torch.arange(k.shape[2], device=k.device)
        back = (every[:, None] - every)[None]
    mask = ((back >= 0) & (back < window) if window else back >= 0)[:, None]
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale, enable_gqa=gqa)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.tanh((q @ k.transpose(-1, -2)).float() * (scale / softcap)) * softcap
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype)
    return F.dropout(weights, dropout) @ v
