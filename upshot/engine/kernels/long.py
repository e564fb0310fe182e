"""Attention of long runs of queries by cuDNN (in tests on the CPU: PyTorch's flash attention), for engine and learner.

On an H200 cuDNN is 1.6 to 1.8 times as fast as PyTorch's flash attention from 8,192 ids on (docs/performance.md), but
its causal mask assumes that query 0 is at key 0. A run of queries at the end of its keys (a later chunk of a prompt)
therefore takes two calls: the run to the keys before it, without a mask, and the run to itself, with one. Both return
each query's log-sum-exp, by which `merge` weights the two results. Each part has its own backward pass, given the
merged result and log-sum-exp: the softmax's derivative needs nothing else of the other part.

cuDNN makes a plan for every new combination of lengths, which takes far longer than a call. Lengths are therefore
rounded up to multiples of GRAIN: padding queries come before the run, and padding keys after it, where the causal mask
hides them from every real query. Windows, soft caps, sinks and dropout are not covered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

GRAIN = 512
"""Lengths are multiples of this many ids."""
SHORTEST = 4096
"""Shorter runs use other kernels: at 2,048 queries the overhead of the calls is more than they save."""


def cudnn_takes(q: Tensor) -> bool:
    """Whether cuDNN's attention takes these queries, forward and backward."""
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    return q.is_cuda and fits and torch.cuda.get_device_capability(q.device)[0] >= 9


class Part(NamedTuple):
    """The result of one call of the library's attention."""

    out: Tensor
    """[1, heads, queries, dim]"""
    lse: Tensor
    """[1, heads, queries, …]: each query's log-sum-exp of scores, in the library's own shape."""
    rest: tuple[Any, ...] = ()
    """What its backward pass needs besides."""


def run_part(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Part:
    """Attention of q [1, heads, queries, dim] to k, v [1, kv_heads, keys, dim]."""
    if not q.is_cuda:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return Part(*torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale))
    out, lse, *rest, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return Part(out, lse, tuple(rest))


def run_part_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, part: Part, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `part` holds the merged result and log-sum-exp of all parts."""
    if not q.is_cuda:
        groups = q.shape[1] // k.shape[1]
        wide = [x.repeat_interleave(groups, 1) for x in (k, v)]
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, *wide, part.out, part.lse, 0.0, causal, scale=scale
        )
        return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
    ends_q, ends_k, max_q, max_k, seed, offset = part.rest
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, part.out, part.lse, seed, offset, None, ends_q, ends_k, max_q, max_k, 0.0, causal, scale=scale
    )


def merge(a: Part, b: Part) -> Part:
    """Merge two partial results over different keys; may overwrite `a`."""
    if not a.out.is_cuda:
        _, heads, rows, _ = a.out.shape
        lse = torch.logaddexp(a.lse, b.lse)
        weigh = [(part.lse - lse).exp().view(1, heads, rows, 1) for part in (a, b)]
        return Part(a.out * weigh[0] + b.out * weigh[1], lse, a.rest)
    from upshot.engine.kernels.long_rows import merge_rows

    merge_rows(a.out, a.lse, b.out, b.lse)
    return a


class Run(NamedTuple):
    """A padded run of queries at the end of its keys."""

    q: Tensor
    """[1, heads, size, dim]"""
    before: tuple[Tensor, Tensor] | None
    """Keys and values before the run [1, kv_heads, base, dim], None if there are none."""
    own: tuple[Tensor, Tensor]
    """Keys and values of the run itself [1, kv_heads, size, dim]."""
    lead: int
    """Padding queries before the first real one."""


def lay_out(q: Tensor, k: Tensor, v: Tensor, grain: int = GRAIN) -> Run:
    """The padded run of q [n, heads, dim], the last n tokens of k, v [keys, kv_heads, dim]."""
    n, keys = len(q), len(k)
    base = (keys - n) // grain * grain
    lead, tail = keys - n - base, -(keys - base) % grain

    def rows(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[None]

    before = (rows(k[:base]), rows(v[:base])) if base else None
    of_run = tuple(rows(pad(x[base:], 0, tail)) for x in (k, v))
    return Run(rows(pad(q, lead, tail)), before, (of_run[0], of_run[1]), lead)


def pad(x: Tensor, lead: int, tail: int) -> Tensor:
    """x [rows, heads, dim] with `lead` rows of zeros before it and `tail` after it."""
    return F.pad(x, (0, 0, 0, 0, lead, tail)) if lead or tail else x


def run_forward(run: Run, scale: float) -> Part:
    """Both parts, merged."""
    itself = run_part(run.q, *run.own, True, scale)
    return itself if run.before is None else merge(itself, run_part(run.q, *run.before, False, scale))


def long_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, grain: int = GRAIN) -> Tensor:
    """Attention of q [n, heads, dim], the last of the tokens k, v [keys, kv_heads, dim]."""
    run = lay_out(q, k, v, grain)
    return run_forward(run, scale).out[0].transpose(0, 1)[run.lead : run.lead + len(q)]


def long_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, part: Part, scale: float, grain: int = GRAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of `long_attention`, given its result and `part` of `run_forward`."""
    n, run = len(q), lay_out(q, k, v, grain)
    tail = run.q.shape[2] - run.lead - n
    padded = [pad(x, run.lead, tail).transpose(0, 1)[None] for x in (grad, out)]
    whole = part._replace(out=padded[1])
    dq, dk, dv = run_part_backward(padded[0], run.q, *run.own, whole, True, scale)
    stop = run.lead + n
    grads = [x[0].transpose(0, 1) for x in (dq, dk, dv)]
    dk, dv = grads[1][:stop], grads[2][:stop]
    if run.before is not None:
        more = run_part_backward(padded[0], run.q, *run.before, whole, False, scale)
        grads[0] = grads[0] + more[0][0].transpose(0, 1)
        dk, dv = (torch.cat([x[0].transpose(0, 1), y]) for x, y in zip(more[1:], (dk, dv), strict=True))
    return grads[0][run.lead : stop], dk, dv
