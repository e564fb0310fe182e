"""The kernels' functions in PyTorch's own operations: what runs on a CPU, and what the kernels are held to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Rotation = tuple[Tensor, Tensor]
"""cos and sin of each token, [tokens, dim / 2]; of half the rotated part, where only a part of a head is rotated."""
EARLY, LATE, OFFSET = 0, 1, 2
"""How a norm meets its weight: rounded before it (Llama), rounded after it (OLMo 2), after 1 + weight (Gemma)."""
SILU, GELU = 0, 1
"""What the gate is made of; GELU is the one with tanh."""


class HeadNorms(NamedTuple):
    """The weights of the norms of queries and of keys, of a head or of all heads side by side."""

    q: Tensor
    k: Tensor
    eps: float
    form: int = EARLY


class AttentionOptions(NamedTuple):
    """How one layer attends."""

    scale: float
    """Factor on the scores."""
    window: int = 0
    """How many tokens a query looks back; 0: to the first one."""
    softcap: float = 0.0
    """Bound of the scores (Gemma 2); 0: none."""
    sinks: Tensor | None = None
    """[heads] scores of a key that every query sees and that has no value (GPT-OSS)."""
    dropout: float = 0.0

    def is_plain(self, longest: int) -> bool:
        """Whether nothing but the causal mask matters in sequences of up to `longest` tokens."""
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
    """RMS norm of x + residual (or that sum again, without a weight), and x + residual itself.

    `after`: x is normed by this weight first. `factor`: and multiplied by it.
    """
    if after is not None:
        x = norm(x, after, eps, form)
    if factor != 1.0:
        x = x * factor
    summed = x if residual is None else x + residual
    return summed if weight is None else norm(summed, weight, eps, form), summed


def norm(x: Tensor, weight: Tensor, eps: float, form: int = EARLY) -> Tensor:
    """RMS norm of rows, float32 inside, rounded where transformers does."""
    if form == OFFSET:
        weight = 1.0 + weight.float()
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    if form == EARLY:
        return weight * _without_weight(x, eps)[0].to(x.dtype)
    return (_without_weight(x, eps)[0] * weight).to(x.dtype)


def norm_heads(x: Tensor, weight: Tensor, eps: float, form: int = EARLY) -> Tensor:
    """RMS norm of each head of x [tokens, heads, dim], or of all heads of a token where the weight is that long."""
    rows = x if len(weight) == x.shape[-1] else x.flatten(1)
    return norm(rows, weight, eps, form).view(x.shape)


def _without_weight(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The rows without their weight, float32, and what they were multiplied by."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * scale, scale


def _norm_derivative(
    d: Tensor, x: Tensor, weight: Tensor, eps: float, form: int, wants_weight: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradient of the rows (float32), the rows without their weight, and if wanted the weight's gradient."""
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
    """silu(first half) × second half, or gelu."""
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
    """Queries and keys (normed if `norms`) rotated, and values, [tokens, heads, dim]."""
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
    """cos and sin [tokens, 1, dim] from those of half the dimensions."""
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
    """Logits divided (1: not) and under a soft cap (0: none), in place, rounded after each operation."""
    if divisor != 1.0:
        logits = logits.div_(divisor)
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def cap_logits(z: Tensor, cap: float) -> Tensor:
    """Logits under a soft cap; 0: none."""
    return cap * torch.tanh(z / cap) if cap else z


def token_logprobs(
    logits: Tensor, targets: Tensor, inverse: float, cap: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, log-sum-exps and entropies (zeros unless asked for) of rows of logits."""
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
    """Logits become, in place, their gradients; see `logprobs.token_logprobs_backward`."""
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
    """From now on PyTorch's own choice of an attention leaves cuDNN out.

    PyTorch 2.11 prefers it on Hopper GPUs. Its gradients with a mask can be NaN there (pytorch issue 196678). long.py
    calls it by name, for shapes that we checked.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def attention(q: Tensor, k: Tensor, v: Tensor, back: Tensor | None, options: AttentionOptions) -> Tensor:
    """Attention of [rows, heads, queries, dim] to keys [rows, kv_heads, keys, dim], differentiable.

    `back` [rows, queries, keys] is how many tokens a key lies before a query, negative where it is not to be seen.
    None: the same numbers begin both, so that the plain causal mask holds.
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
