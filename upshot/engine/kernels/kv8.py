"""Keys and values in 8 bits (E4M3): how they are rounded and where they lie.

Keys lie as in 16 bits, [pages, kv_heads, page_size, dim]. Values lie transposed inside their page, [pages, kv_heads,
dim, page_size]: the product with the weights sums over ids, and the matrix units take numbers of 8 bits that are summed
over side by side; from rows of a value they would be collected byte by byte. No scales: a fixed factor puts values of
usual size where the format is dense, and rounding of a key or value is relative anyway. What is beyond the format's
largest number becomes that number, and so does what is none: nothing in a page can spoil another sequence's sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from upshot.engine.kernels.fp8 import E4M3, LARGEST

KEY_FACTOR = tl.constexpr(1.0)
VALUE_FACTOR = tl.constexpr(4.0)


def in_8_bits(cache: Tensor) -> bool:
    """Whether a cache of keys or values is."""
    return cache.dtype == E4M3


@triton.jit
def to_8_bits(x, FACTOR: tl.constexpr):
    """Rounded, with its factor in it."""
    return tl.minimum(tl.maximum(x.to(tl.float32) * FACTOR, -LARGEST), LARGEST).to(tl.float8e4nv)


@triton.jit
def value_place(page, head, offset, dims, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Where the numbers `dims` of a value lie that is the `offset`-th of its page."""
    return (page * KV_HEADS + head) * (PAGE * D) + dims * PAGE + offset
