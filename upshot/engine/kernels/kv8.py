"""Keys and values in 8 bits (E4M3): rounding and layout, used by the attention kernels and those that store KV.

The layout of keys is the same as in 16 bits, [pages, kv_heads, page_size, dim]. Values are transposed inside their
page, [pages, kv_heads, dim, page_size]: the product of weights and values sums over ids, and matrix units need the
8-bit numbers of a sum next to each other in memory. There are no scales: a fixed factor puts values of usual size into
the dense range of the format, and rounding is relative anyway.

Numbers beyond the format's range, and NaN, become its largest number, so a page never holds NaN. Kernels rely on this:
they load whole pages and give entries behind a sequence's end the weight 0, and 0 × NaN would be NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from upshot.engine.kernels.fp8 import E4M3, LARGEST

KEY_FACTOR = tl.constexpr(1.0)
VALUE_FACTOR = tl.constexpr(4.0)


def in_8_bits(cache: Tensor) -> bool:
    """Whether a cache of keys or values is in 8 bits."""
    return cache.dtype == E4M3


@triton.jit
def to_8_bits(x, FACTOR: tl.constexpr):
    """x × FACTOR, rounded to 8 bits."""
    return tl.minimum(tl.maximum(x.to(tl.float32) * FACTOR, -LARGEST), LARGEST).to(tl.float8e4nv)


@triton.jit
def value_place(page, head, offset, dims, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Offsets into the cache of the elements `dims` of the value in cell `offset` of a page."""
    return (page * KV_HEADS + head) * (PAGE * D) + dims * PAGE + offset
