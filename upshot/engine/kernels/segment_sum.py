"""Sums gradients of rows that were read several times, in float32 and in a fixed order. For the learner's attention.

On a GPU, PyTorch's index_add_ uses atomics in arbitrary order, so the same step would not give the same bits twice. Two
tensors at once, because the indices of keys and values are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _segment_sums(a_ptr, b_ptr, a_out_ptr, b_out_ptr, places_ptr, ends_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < width
    a = tl.zeros((BLOCK,), dtype=tl.float32)
    b = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(tl.load(ends_ptr + row), tl.load(ends_ptr + row + 1)):
        at = tl.load(places_ptr + i).to(tl.int64) * width + cols
        a += tl.load(a_ptr + at, mask=live, other=0.0).to(tl.float32)
        b += tl.load(b_ptr + at, mask=live, other=0.0).to(tl.float32)
    to = row.to(tl.int64) * width + cols
    tl.store(a_out_ptr + to, a.to(a_out_ptr.dtype.element_ty), mask=live)
    tl.store(b_out_ptr + to, b.to(b_out_ptr.dtype.element_ty), mask=live)


def segment_sums(a: Tensor, b: Tensor, places: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """Row n of each result is the sum of the rows places[ends[n] : ends[n + 1]] of `a` or `b` [rows, …]."""
    a, b = a.contiguous(), b.contiguous()
    width = a[0].numel()
    sums = [torch.empty(len(ends) - 1, *x.shape[1:], dtype=x.dtype, device=x.device) for x in (a, b)]
    block = min(1024, triton.next_power_of_2(width))
    grid = (len(ends) - 1, triton.cdiv(width, block))
    _segment_sums[grid](a, b, *sums, places, ends, width, BLOCK=block)
    return tuple(sums)
