"""Log-probability of a token, log-sum-exp and entropy of rows of logits in one pass, for the learner; and gradients.

Everything is computed in float32, whatever the dtype of the logits. The forward reads a row's logits once, with one
program per row (the running sum is scaled down whenever a larger logit comes). The backward pass overwrites the logits
with their gradients, so there is no second tensor of that size, the largest of a small model's step; it sums nothing,
so a row is cut into blocks that are computed in parallel.

`finish_logits` is for the engine: what some families do to logits after the head (division, soft cap).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _tanh(x):
    # tl has no tanh that every backend and the interpreter know.
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _finish_logits(x_ptr, total, divisor, cap, DIVIDED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + at, mask=at < total, other=0.0).to(tl.float32)
    if DIVIDED:
        x = (x / divisor).to(dtype).to(tl.float32)
    if CAPPED:
        x = (x / cap).to(dtype).to(tl.float32)
        x = cap * _tanh(x).to(dtype).to(tl.float32)
    tl.store(x_ptr + at, x.to(dtype), mask=at < total)


def finish_logits(logits: Tensor, divisor: float, cap: float) -> Tensor:
    """See `plain.finish_logits`; here in one pass."""
    if divisor != 1.0 or cap:
        total = logits.numel()
        _finish_logits[(triton.cdiv(total, BLOCK),)](
            logits, total, divisor, cap, DIVIDED=divisor != 1.0, CAPPED=cap > 0, BLOCK=BLOCK
        )
    return logits


@triton.jit
def _token_logprobs(
    logits_ptr, stride, targets_ptr, logprobs_ptr, sums_ptr, entropy_ptr, V, inverse, cap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = logits_ptr + row.to(tl.int64) * stride
    top = tl.full((), -float("inf"), dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    weighted = tl.zeros((), dtype=tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        live = cols < V
        z = tl.load(base + cols, mask=live, other=0.0).to(tl.float32)
        if CAPPED:
            z = cap * _tanh(z / cap)
        z = tl.where(live, z * inverse, -float("inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        shrink = tl.exp(top - higher)
        p = tl.exp(z - higher)
        total = total * shrink + tl.sum(p, 0)
        if ENTROPY:
            weighted = weighted * shrink + tl.sum(p * tl.where(live, z, 0.0), 0)
        top = higher
    lse = top + tl.log(total)
    logit = tl.load(base + tl.load(targets_ptr + row)).to(tl.float32)
    if CAPPED:
        logit = cap * _tanh(logit / cap)
    tl.store(logprobs_ptr + row, logit * inverse - lse)
    tl.store(sums_ptr + row, lse)
    if ENTROPY:
        tl.store(entropy_ptr + row, lse - weighted / total)


@triton.jit
def _token_logprobs_backward(
    logits_ptr, stride, targets_ptr, sums_ptr, entropy_ptr, grads_ptr, entropy_grads_ptr, V, inverse, cap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < V
    places = logits_ptr + row.to(tl.int64) * stride + cols
    raw = tl.load(places, mask=live, other=0.0).to(tl.float32)
    slope = tl.full((BLOCK,), 1.0, dtype=tl.float32)
    if CAPPED:
        bent = _tanh(raw / cap)
        slope = 1.0 - bent * bent
        raw = cap * bent
    logp = raw * inverse - tl.load(sums_ptr + row)
    p = tl.exp(logp)
    hit = cols == tl.load(targets_ptr + row)
    grad = tl.load(grads_ptr + row) * (tl.where(hit, 1.0, 0.0) - p)
    if ENTROPY:
        grad -= tl.load(entropy_grads_ptr + row) * p * (logp + tl.load(entropy_ptr + row))
    tl.store(places, (grad * slope * inverse).to(logits_ptr.dtype.element_ty), mask=live)


def token_logprobs(
    logits: Tensor, targets: Tensor, inverse: float, cap: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, log-sum-exps and entropies (zeros unless asked for) of rows of logits."""
    rows, vocab = logits.shape
    logprobs, sums, spread = torch.zeros(3, rows, dtype=torch.float32, device=logits.device)
    _token_logprobs[(rows,)](
        logits, logits.stride(0), targets, logprobs, sums, spread, vocab, inverse, cap,
        CAPPED=cap > 0, ENTROPY=entropy, BLOCK=min(BLOCK, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
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
    """Overwrite logits with their gradients, given those of log-probabilities (`grads`) and entropies, [rows] each."""
    rows, vocab = logits.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _token_logprobs_backward[(rows, triton.cdiv(vocab, block))](
        logits, logits.stride(0), targets, sums, entropy, grads, grads if entropy_grads is None else entropy_grads,
        vocab, inverse, cap, CAPPED=cap > 0, ENTROPY=entropy_grads is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
