"""The way up and the gate in one kernel: silu(x · gateᵀ) × (x · upᵀ), for models whose rows are short.

There the product's result, twice as wide as what is kept of it, costs more to write and read than the library's
better product saves; for longer rows it is the other way round. Tiles come by the copy engine (Hopper and later).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK_M, BLOCK_N, BLOCK_K = 128, 64, 64


@triton.jit(do_not_specialize=["M"])
def _gated(
    x_desc,
    weight_desc,
    out_ptr,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Rows next to each other read the same weights.
    tiles = tl.cdiv(M, BLOCK_M)
    row = tl.program_id(0) % tiles * BLOCK_M
    col = tl.program_id(0) // tiles * BLOCK_N
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=3):
        x = x_desc.load([row, k])
        gate = tl.dot(x, weight_desc.load([col, k]).T, gate)
        up = tl.dot(x, weight_desc.load([N + col, k]).T, up)
    dtype = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    act = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    out = (act * up.to(dtype).to(tl.float32)).to(dtype)
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    at = rows[:, None].to(tl.int64) * N + cols[None, :]
    tl.store(out_ptr + at, out, mask=(rows < M)[:, None] & (cols < N)[None, :])


def worthwhile(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this is faster than the library's product and `gate`: many short rows of 16-bit numbers."""
    rows, width = x.shape
    return (
        x.is_cuda
        and rows >= 512
        and width <= 1024
        and width % 8 == 0
        and weight.shape[0] % (2 * BLOCK_N) == 0
        and x.element_size() == 2
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )


def gated_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x · first halfᵀ) × (x · second halfᵀ) of weight [2n, k]."""
    (rows, width), n = x.shape, weight.shape[0] // 2
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    _gated[(triton.cdiv(rows, BLOCK_M) * triton.cdiv(n, BLOCK_N),)](
        TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_K]),
        TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K]),
        out, rows, N=n, K=width, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
    return out
