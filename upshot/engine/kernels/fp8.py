"""Matrix products in 8 bits: E4M3 weights with one scale, activations with one scale per token (llama/eight_bit.py).

`norm.add_norm`, `gate.gate` and `decode.decode_attention` (where it merges parts) quantize what they write; `quantize`
is for other activations, `weight_quantizer` for weights, with a low-rank adapter merged if there is one.

`product` of many rows is PyTorch's. With a scale per token it is up to a third slower than without, so these scales are
left out, and the kernels that read the result multiply by them: `norm.add_norm`, `gate.gate`, `rotary.rotate_store` and
`decode_fused`. With few rows, the time is that of reading the weights. `_product` does this at the memory's speed, with
split-K where one wave of programs would leave the GPU half idle. It loads tiles by TMA (Hopper and later).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from upshot.engine.kernels.launch import Launcher, processors

E4M3 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
"""The largest number of the format."""
LEAST = tl.constexpr(1e-12)
"""The largest absolute value of a row counts as at least this, so that a row of zeros does not divide by zero."""
MOST_RANK = 128
"""The largest rank of an adapter that `weight_quantizer` merges."""
MOST_TILED = 32
"""Up to this many rows, our own product is faster than PyTorch's."""
MOST_UNSCALED = 1024
"""Up to this many rows, PyTorch's product is faster without scales per token."""


class ScaledRows(NamedTuple):
    """Rows that still have to be multiplied by their scales: quantized activations, a product of such, or a weight."""

    values: Tensor
    """[rows, n], in 8 bits or, for a product, in the model's dtype."""
    scale: Tensor
    """[rows]; of a weight [1]."""


def parts_of(x: Tensor | ScaledRows) -> tuple[Tensor, Tensor, bool]:
    """Arguments of a kernel: values, scales, and whether there are scales."""
    return (*x, True) if isinstance(x, ScaledRows) else (x, x, False)


def empty_rows8(rows: int, n: int, device: torch.device) -> ScaledRows:
    """Uninitialised rows in 8 bits."""
    return ScaledRows(torch.empty(rows, n, dtype=E4M3, device=device), torch.empty(rows, device=device))


@triton.jit
def store_row(x, row, cols, live, out_ptr, scale_ptr, N: tl.constexpr):
    """Quantize and store a whole row of float32 numbers, a tile of any shape, by its largest absolute value."""
    step = tl.maximum(tl.max(tl.abs(x)), LEAST) / LARGEST
    tl.store(out_ptr + row * N + cols, (x * (1.0 / step)).to(out_ptr.dtype.element_ty), mask=live)
    tl.store(scale_ptr + row, step)


@triton.jit
def _quantize(x_ptr, out_ptr, scale_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    live = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=live, other=0.0).to(tl.float32)
    store_row(x, row, cols, live, out_ptr, scale_ptr, N)


_launch_quantize = Launcher(_quantize)


def row_warps(block: int) -> int:
    """Warps for a program that holds a row of `block` numbers."""
    return 4 if block < 2048 else 8 if block < 8192 else 16 if block < 16384 else 32


def quantize(x: Tensor, out: ScaledRows | None = None) -> ScaledRows:
    """x [rows, n] in 8 bits with a scale per row."""
    rows, n = x.shape
    out = empty_rows8(rows, n, x.device) if out is None else out
    block = triton.next_power_of_2(n)
    _launch_quantize((rows, 1, 1), (x, *out), (), (n, block), row_warps(block))
    return out


@triton.jit(do_not_specialize=["alpha"])
def _quantize_weights(
    table_ptr, x_ptr, up_ptr, down_ptr, out_ptr, scale_ptr, alpha,
    N: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """For rows of a weight W + alpha × up × down of the table: raise its scale to what their largest number needs, or
    (WRITE) write them quantized by the scale. The other pointers are those of its first weight and tell the dtypes."""
    weight = table_ptr + tl.program_id(1) * 6
    rows = tl.load(weight + 5)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) * BLOCK_M < rows:
        x_ptr = tl.multiple_of(tl.load(weight).to(x_ptr.dtype), ALIGN)
        out_ptr = tl.multiple_of(tl.load(weight + 3).to(out_ptr.dtype), ALIGN)
        scale_ptr = tl.load(weight + 4).to(scale_ptr.dtype)
        cols = tl.arange(0, BLOCK_N)
        here = (row < rows)[:, None]
        at = row.to(tl.int64)[:, None] * N + cols[None, :]
        most = tl.zeros([BLOCK_M], dtype=tl.float32)
        scale = 1.0
        if WRITE:
            scale = tl.load(scale_ptr)
        if RANK > 0:
            up_ptr = tl.load(weight + 1).to(up_ptr.dtype)
            rank = tl.arange(0, RANK)
            up = tl.load(up_ptr + row[:, None] * R + rank[None, :], mask=here & (rank < R)[None, :], other=0.0)
            up = (up.to(tl.float32) * alpha).to(tl.float32)
            down_ptr = tl.multiple_of(tl.load(weight + 2).to(down_ptr.dtype), ALIGN)
            below = down_ptr + rank[:, None] * N + cols[None, :]
        for n in range(0, N, BLOCK_N):
            live = (n + cols < N)[None, :]
            x = tl.load(x_ptr + at + n, mask=here & live, other=0.0).to(tl.float32)
            if RANK > 0:
                down = tl.load(below + n, mask=(rank < R)[:, None] & live, other=0.0).to(tl.float32)
                x = tl.dot(up, down, x, input_precision="tf32")
            if WRITE:
                tl.store(out_ptr + at + n, (x / scale).to(out_ptr.dtype.element_ty), mask=here & live)
            else:
                most = tl.maximum(most, tl.max(tl.abs(x), 1))
        if not WRITE:
            tl.atomic_max(scale_ptr, tl.max(most, 0) / LARGEST)


_launch_weights = Launcher(_quantize_weights)


class WideWeight(NamedTuple):
    """A weight to be quantized."""

    values: Tensor
    """[rows, n]"""
    adapter: tuple[Tensor, Tensor, float] | None
    """(up, down, alpha): alpha × up × down is added first."""
    out: ScaledRows
    """What is written; several weights may share the scale."""


def weight_quantizer(weights: Sequence[WideWeight]) -> Callable[[bool], None]:
    """A function that quantizes these weights in two calls: False raises their scales to what they need, True writes.

    A model has hundreds of weights; one launch serves all of the same width, whose addresses it reads from a table.
    """
    alike: dict[Any, list[tuple[Tensor, ...]]] = defaultdict(list)
    for values, adapter, out in weights:
        up, down, alpha = adapter or (values, values, 0.0)
        rank = up.shape[1] if adapter else 0
        alike[values.shape[1], rank, alpha, values.dtype, up.dtype, down.dtype].append((values, up, down, *out))
    launches = []
    for (n, rank, alpha, *_), group in alike.items():
        table = [[*(tensor.data_ptr() for tensor in tensors), len(tensors[0])] for tensors in group]
        padded = max(16, triton.next_power_of_2(rank)) if rank else 0
        align = 1 if any(address % 16 for *addresses, _, _ in table for address in addresses) else 16
        grid = (-(-max(row[-1] for row in table) // 128), len(table), 1)
        tensors = (torch.tensor(table, device=group[0][0].device), *group[0])
        launches.append((grid, tensors, (alpha,), (n, rank, padded, 128, 64, align)))

    def quantize(write: bool) -> None:
        for grid, tensors, numbers, constants in launches:
            _launch_weights(grid, tensors, numbers, (*constants, write), 4)

    return quantize


@dataclass(frozen=True, slots=True)
class Tile8:
    """The tile of one program (`cols` rows of the weight × `rows` of x, `depth` of K at a time); `parts`: split-K."""

    rows: int
    cols: int
    depth: int = 128
    parts: int = 1
    stages: int = 4
    warps: int = 4


@triton.jit(do_not_specialize=["M"])
def _product(
    x_desc, weight_desc, x_scale_ptr, weight_scale_ptr, out_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of x · weightᵀ, or one of PARTS partial sums of it.

    The weight is the left operand, because tensor cores take at least 64 rows there and x has fewer.
    """
    col = tl.program_id(1) * BLOCK_N
    row = tl.program_id(0) * BLOCK_M
    part = tl.program_id(2)
    turns = tl.cdiv(K, BLOCK_K * PARTS)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for k in tl.range(part * turns * BLOCK_K, (part + 1) * turns * BLOCK_K, BLOCK_K, num_stages=STAGES):
        weight = weight_desc.load([col, k])
        acc = tl.dot(weight, x_desc.load([row, k]).T, acc)
    cols = col + tl.arange(0, BLOCK_N)
    rows = row + tl.arange(0, BLOCK_M)
    acc *= tl.load(x_scale_ptr + rows, mask=rows < M, other=0.0)[None, :] * tl.load(weight_scale_ptr)
    at = (part.to(tl.int64) * M + rows.to(tl.int64))[:, None] * N + cols[None, :]
    live = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(out_ptr + at, acc.T.to(out_ptr.dtype.element_ty), mask=live)


def tile_product(x: ScaledRows, weight: ScaledRows, tile: Tile8, dtype: torch.dtype) -> Tensor:
    """x · weightᵀ [rows, n]; with tile.parts > 1 as float32 partial sums [parts, rows, n]."""
    (rows, width), n = x.values.shape, weight.values.shape[0]
    shape, kind = ((rows, n), dtype) if tile.parts == 1 else ((tile.parts, rows, n), torch.float32)
    out = torch.empty(shape, dtype=kind, device=x.values.device)
    _product[(triton.cdiv(rows, tile.rows), triton.cdiv(n, tile.cols), tile.parts)](
        TensorDescriptor.from_tensor(x.values, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight.values, [tile.cols, tile.depth]),
        x.scale, weight.scale, out, rows, n, width, BLOCK_M=tile.rows, BLOCK_N=tile.cols, BLOCK_K=tile.depth,
        PARTS=tile.parts, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out


@cache
def _ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count, device=device)


def library_product(x: ScaledRows, weight: ScaledRows, dtype: torch.dtype) -> Tensor | ScaledRows:
    """x · weightᵀ by PyTorch; up to MOST_UNSCALED rows without the scales per token."""
    ones, by_row = _ones(len(weight.values), x.values.device), len(x.values) > MOST_UNSCALED
    scale, other = ((x.scale * weight.scale)[:, None], ones[None]) if by_row else (ones[:1], weight.scale)
    values = torch._scaled_mm(x.values, weight.values.t(), scale, other, out_dtype=dtype, use_fast_accum=True)
    return values if by_row else ScaledRows(values, x.scale)


def tile_for(rows: int, n: int, width: int, units: int, parts: bool) -> Tile8 | None:
    """The tile with which `_product` is faster than PyTorch's on `units` multiprocessors, None if there is none.

    Measured (docs/dev/performance-2026-11.md): with few rows, it only matters that every multiprocessor reads weights,
    as far ahead as its shared memory allows. `parts`: split-K is allowed; all programs must then run at once.
    """
    if rows > MOST_TILED:
        return None
    height = 16 if rows <= 16 else 32
    tiles = triton.cdiv(n, 64)
    cuts = (p for p in (8, 4, 2) if parts and p * tiles <= 2 * units and p * 512 <= width)
    return Tile8(height, 64, 256, next(cuts, 1), 4)


def product(x: ScaledRows, weight: ScaledRows, dtype: torch.dtype, parts: bool = False) -> Tensor | ScaledRows:
    """x · weightᵀ [rows, n], or `ScaledRows` of it; with `parts` maybe float32 partial sums [parts, rows, n]."""
    (n, width), device = weight.values.shape, weight.values.device
    if not len(x.values):  # the last layer of a chunk from which nothing is sampled; a tile has at least one row
        return torch.empty(0, n, dtype=dtype, device=device)
    tile = tile_for(len(x.values), n, width, processors(device), parts) if device.type == "cuda" else None
    return library_product(x, weight, dtype) if tile is None else tile_product(x, weight, tile, dtype)
