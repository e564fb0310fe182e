"""The gate of a Llama MLP, silu(gate) × up: as a kernel of its own, fused with its product, and its backward pass.

`gate` takes the joined gate and up projections; engine and learner use it. `gated_product` computes projections and
gate at once, for the engine only, as the learner's backward pass needs the projections. These are twice as wide as the
result; not writing and reading them saves more than PyTorch's faster product, as long as rows are not too long and
tiles fill the GPU. It loads tiles by TMA (Hopper and later).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from upshot.engine.kernels.fp8 import ScaledRows, empty_rows8, parts_of, row_warps, store_row
from upshot.engine.kernels.launch import Launcher, processors, shared_memory
from upshot.engine.kernels.plain import SILU

PTX = tl.constexpr(torch.version.cuda is not None and isinstance(store_row, triton.JITFunction))
"""Whether a kernel may contain NVIDIA's instructions: not in the interpreter, not on other GPUs."""
FAST_SILU = tl.constexpr(
    "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; "  # exp(-x); the constant is -log2(e)
    "add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }"
)
"""x / (1 + exp(-x)) without the steps for numbers below 1e-38, which are a third of the gate's instructions."""


@triton.jit
def _activate(x, ACT: tl.constexpr):
    """silu, or gelu by tanh (plain.SILU, GELU)."""
    if ACT == 0 and PTX:
        result = tl.inline_asm_elementwise(FAST_SILU, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    elif ACT == 0:
        result = x / (1.0 + tl.exp(-x))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # 1 + tanh by exp: the interpreter does not have libdevice's
        result = x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    return result


@triton.jit
def _gate(
    x_ptr, factor_ptr, out_ptr, scale_ptr,
    N: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr, SCALED: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < N
    dtype = x_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * N + cols, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * N + N + cols, mask=live, other=0.0).to(tl.float32)
    if SCALED:
        factor = tl.load(factor_ptr + row)
        gate *= factor
        up *= factor
    act = _activate(gate, ACT)
    if NARROW:  # without rounding to 16 bits first, which would take as long as the rest
        store_row(act * up, row, cols, live, out_ptr, scale_ptr, N)
    else:
        tl.store(out_ptr + row * N + cols, (act.to(dtype).to(tl.float32) * up).to(dtype), mask=live)


_launch_gate = Launcher(_gate)


def gate(product: Tensor | ScaledRows, act: int = SILU, narrow: bool = False) -> Any:
    """silu (or gelu) of the first half of a product [rows, 2n], times the second half; `narrow`: in 8 bits."""
    x, factor, scaled = parts_of(product)
    rows, n = x.shape[0], x.shape[1] // 2
    whole = triton.next_power_of_2(n)
    if narrow:
        narrowed = empty_rows8(rows, n, x.device)
        _launch_gate((rows, 1, 1), (x, factor, *narrowed), (), (n, whole, act, scaled, True), row_warps(whole))
        return narrowed
    out, block = x.new_empty(rows, n), min(2048, whole)
    _launch_gate((rows, triton.cdiv(n, block), 1), (x, factor, out, x), (), (n, block, act, scaled, False), 4)
    return out


@triton.jit
def _gate_backward(x_ptr, d_ptr, N: tl.constexpr, BLOCK: tl.constexpr, AGAIN: tl.constexpr, ACT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < N
    dtype = x_ptr.dtype.element_ty
    at = row * 2 * N + cols
    gate = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + at + N, mask=live, other=0.0).to(tl.float32)
    d = tl.load(d_ptr + row * N + cols, mask=live, other=0.0).to(tl.float32)
    if ACT == 0:
        below = 1.0 + tl.exp(-gate)
        share = 1.0 / below
        active = gate / below
        slope = share * (1.0 + gate * (1.0 - share))
    else:
        # gelu is gate × sigmoid(2 × inner)
        share = 1.0 - 1.0 / (tl.exp(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) + 1.0)
        active = gate * share
        slope = share + active * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    act = active.to(dtype).to(tl.float32)  # rounded as in the forward, where it was multiplied
    tl.store(x_ptr + at, (d * up * slope).to(dtype), mask=live)
    tl.store(x_ptr + at + N, (d * act).to(dtype), mask=live)
    if AGAIN:
        tl.store(d_ptr + row * N + cols, (act * up).to(dtype), mask=live)


_launch_gate_backward = Launcher(_gate_backward)


def gate_backward(x: Tensor, d: Tensor, again: bool, act: int = SILU) -> Tensor:
    """Overwrite gate and up projections x [rows, 2n] with their gradients, from the gradient `d` [rows, n] of `gate`.

    `again`: overwrite `d` with the result of `gate`, which the forward need not keep.
    """
    rows, n = d.shape
    block = min(1024, triton.next_power_of_2(n))
    _launch_gate_backward((rows, triton.cdiv(n, block), 1), (x, d), (), (n, block, again, act), 4)
    return x


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one program: `rows` of x, `cols` of the gate and as many of the up projection, `depth` of K."""

    rows: int
    cols: int
    depth: int
    stages: int
    warps: int


LARGEST_BYTES = 230_000
"""Shared memory that the largest tile needs; GPUs with less are older than Hopper, or consumer cards."""
SMALL, MIDDLE, LARGE = Tile(64, 64, 128, 4, 4), Tile(128, 64, 64, 4, 4), Tile(128, 128, 64, 4, 8)


@triton.jit(do_not_specialize=["M"])
def _gated_product(
    x_desc, weight_desc, out_desc, M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """A persistent kernel: each of n programs computes every n-th tile."""
    GROUP: tl.constexpr = 8
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    down = tl.cdiv(M, BLOCK_M)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0)):
        # Programs that run at the same time compute neighbouring tiles, whose inputs are in the L2 cache.
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
        act = _activate(gate, ACT).to(dtype).to(tl.float32)
        out_desc.store([row, col], (act * up.to(dtype).to(tl.float32)).to(dtype))


def tile_for(rows: int, width: int, n: int, units: int) -> Tile | None:
    """The tile with which `gated_product` is faster than a product and `gate` on `units` multiprocessors, if any.

    Measured (docs/dev/performance-2026-11.md): small tiles if all of them run at once, else larger ones if they leave
    no part of the GPU idle. `rows` [rows, width], result [rows, n]; the larger `width`, the less the gate matters.
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


def gated_tile(x: Tensor, weight: Tensor) -> Tile | None:
    """The tile for `gated_product` of x and weight [2n, k]; None if separate kernels are faster."""
    if not x.is_cuda or x.element_size() != 2 or shared_memory(x.device) < LARGEST_BYTES:
        return None
    return tile_for(x.shape[0], x.shape[1], weight.shape[0] // 2, processors(x.device))


def gated_product(x: Tensor, weight: Tensor, tile: Tile, act: int = SILU) -> Tensor:
    """silu(x · first halfᵀ) × (x · second halfᵀ) for the halves of weight [2n, k]; or gelu."""
    (rows, width), n = x.shape, weight.shape[0] // 2
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.cols)
    _gated_product[(min(tiles, processors(x.device)),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.cols, tile.depth]),
        TensorDescriptor.from_tensor(out, [tile.rows, tile.cols]),
        rows, N=n, K=width, BLOCK_M=tile.rows, BLOCK_N=tile.cols, BLOCK_K=tile.depth, STAGES=tile.stages,
        ACT=act, num_warps=tile.warps,
    )  # fmt: skip
    return out
