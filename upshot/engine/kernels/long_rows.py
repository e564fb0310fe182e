"""Triton kernels for long.py and cuda/steps.py: gather pages into flat tensors, merge two partial attention results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from upshot.engine.kernels.kv8 import VALUE_FACTOR, in_8_bits, value_place


@triton.jit
def _merge(a_ptr, b_ptr, lse_a_ptr, lse_b_ptr, rows, a_head, a_row, b_head, b_row,
           D: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """One row of one head: a becomes the weighted sum of a and b, and its log-sum-exp that of both."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, W)
    there = dims < D
    la, lb = tl.load(lse_a_ptr + head * rows + row), tl.load(lse_b_ptr + head * rows + row)
    top = tl.maximum(la, lb)
    ea, eb = tl.exp(la - top), tl.exp(lb - top)
    place = a_ptr + head * a_head + row * a_row + dims
    a = tl.load(place, mask=there).to(tl.float32)
    b = tl.load(b_ptr + head * b_head + row * b_row + dims, mask=there).to(tl.float32)
    tl.store(place, ((a * ea + b * eb) / (ea + eb)).to(a_ptr.dtype.element_ty), mask=there)
    tl.store(lse_a_ptr + head * rows + row, top + tl.log(ea + eb))


def merge_rows(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """Merge `b` into `a`: partial results [1, heads, rows, dim] over different keys, with their log-sum-exps."""
    _, heads, rows, dim = a.shape
    assert lse_a.is_contiguous() and lse_b.is_contiguous()
    strides = (*a.stride()[1:3], *b.stride()[1:3])
    _merge[(rows, heads)](a, b, lse_a, lse_b, rows, *strides, D=dim, W=triton.next_power_of_2(dim), num_warps=1)


@triton.jit
def _gather(k_ptr, v_ptr, pages_ptr, keys_ptr, values_ptr, length,
            KV_HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr,
            EIGHT: tl.constexpr):  # fmt: skip
    """Copy one page of one head from the cache to flat rows."""
    index, head = tl.program_id(0), tl.program_id(1)
    page = tl.load(pages_ptr + index).to(tl.int64)
    offs, dims = tl.arange(0, PAGE), tl.arange(0, W)
    row = index * PAGE + offs
    there = (row < length)[:, None] & (dims < D)[None, :]
    place = (page * KV_HEADS + head) * (PAGE * D) + offs[:, None] * D + dims[None, :]
    target = (row[:, None].to(tl.int64) * KV_HEADS + head) * D + dims[None, :]
    k = tl.load(k_ptr + place, mask=there, other=0.0)
    if EIGHT:
        k = k.to(tl.float32)
        place = value_place(page, head, offs[:, None], dims[None, :], KV_HEADS, D, PAGE)
        v = tl.load(v_ptr + place, mask=there, other=0.0).to(tl.float32) / VALUE_FACTOR
    else:
        v = tl.load(v_ptr + place, mask=there, other=0.0)
    tl.store(keys_ptr + target, k.to(keys_ptr.dtype.element_ty), mask=there)
    tl.store(values_ptr + target, v.to(values_ptr.dtype.element_ty), mask=there)


def gather_pages(k: Tensor, v: Tensor, pages: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values [length, kv_heads, dim] of a sequence with these pages of the cache."""
    _, kv_heads, page, dim = k.shape
    keys, values = (torch.empty(length, kv_heads, dim, dtype=dtype, device=k.device) for _ in range(2))
    _gather[(-(-length // page), kv_heads)](
        k, v, pages, keys, values, length, KV_HEADS=kv_heads, D=dim, W=triton.next_power_of_2(dim), PAGE=page,
        EIGHT=in_8_bits(k), num_warps=4,
    )  # fmt: skip
    return keys, values
