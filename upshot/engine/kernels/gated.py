"""The way up and the gate in one kernel: silu(x · gateᵀ) × (x · upᵀ).

The product's result is twice as wide as what is kept of it. Not writing and reading it is worth more than the
library's better product, as long as rows are not too long and tiles fill the GPU. Tiles come by the copy engine
(Hopper and later).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from upshot.engine.kernels.decode import processors


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes (`cols` of the gate and as many of the way up), and how."""

    rows: int
    cols: int
    depth: int
    stages: int
    warps: int


SMALL, MIDDLE, LARGE = Tile(64, 64, 128, 4, 4), Tile(128, 64, 64, 4, 4), Tile(128, 128, 64, 4, 8)


@triton.jit(do_not_specialize=["M"])
def _gated(
    x_desc,
    weight_desc,
    out_desc,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program computes every n-th tile, n being the number of programs."""
    GROUP: tl.constexpr = 8
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    down = tl.cdiv(M, BLOCK_M)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0)):
        # Programs that run together cover a block of the result: what they read is in the second-level cache.
        first = tile // (GROUP * across) * GROUP
        size = tl.minimum(down - first, GROUP)
        row = (first + tile % (GROUP * across) % size) * BLOCK_M
        col = tile % (GROUP * across) // size * BLOCK_N
        gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = x_desc.load([row, k])
            gate = tl.dot(x, weight_desc.load([col, k]).T, gate)
            up = tl.dot(x, weight_desc.load([N + col, k]).T, up)
        dtype = out_desc.dtype
        gate = gate.to(dtype).to(tl.float32)
        act = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        out_desc.store([row, col], (act * up.to(dtype).to(tl.float32)).to(dtype))


def tile_for(rows: int, width: int, n: int, units: int) -> Tile | None:
    """The tile with which this is faster than the library's product and `gate` on `units` multiprocessors, if any.

    By measurement (docs/performance.md): small tiles where all of them run at once, else larger ones that leave no part
    of the GPU idle. The longer the rows, the less the gate matters.
    """

    def waves(tile: Tile) -> int:
        return -(-(-(-rows // tile.rows) * (n // tile.cols)) // units)

    def used(tile: Tile) -> float:
        return rows * n / (waves(tile) * units * tile.rows * tile.cols)

    if width % 8 or width > 3072 or n % LARGE.cols or rows < 16:
        return None
    if waves(SMALL) == 1:
        return SMALL
    if used(LARGE) >= 0.9:
        return LARGE
    if width <= 768 or (rows <= 128 and width <= 2048 and used(MIDDLE) >= 0.9):
        return MIDDLE
    return None


def gated_tile(x: torch.Tensor, weight: torch.Tensor) -> Tile | None:
    """The tile for silu(x · first halfᵀ) × (x · second halfᵀ) of weight [2n, k], None where the library does better."""
    if not x.is_cuda or x.element_size() != 2 or torch.cuda.get_device_capability(x.device) < (9, 0):
        return None
    return tile_for(x.shape[0], x.shape[1], weight.shape[0] // 2, processors(x.device))


def gated_product(x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """silu(x · first halfᵀ) × (x · second halfᵀ) of weight [2n, k]."""
    (rows, width), n = x.shape, weight.shape[0] // 2
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.cols)
    _gated[(min(tiles, processors(x.device)),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.cols, tile.depth]),
        TensorDescriptor.from_tensor(out, [tile.rows, tile.cols]),
        rows, N=n, K=width, BLOCK_M=tile.rows, BLOCK_N=tile.cols, BLOCK_K=tile.depth, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
    return out
