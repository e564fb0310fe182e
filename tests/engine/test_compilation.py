"""Every kernel compiles for a Hopper GPU, without one: the interpreter takes programs that the compiler refuses."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from upshot.engine.kernels import block, decode, decode_fused, gated, prefill, sample

TYPES = {
    "*i32": "table_ptr slots_ptr lengths_ptr starts_ptr leaders_ptr prefix_ptr members_ptr offsets_ptr counts_ptr "
    "place_ptr top_k_ptr",
    "*i64": "cells_ptr tokens_ptr ids_ptr seeds_ptr",
    "*fp32": "acc_ptr ml_ptr tops_ptr masses_ptr temperature_ptr top_p_ptr min_p_ptr logprobs_ptr",
    "i32": "table_stride stride_t stride_h window parts own rows n M V dummy",
    "fp32": "scale softcap eps",
}
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names.split()}
HEADS = {"HEADS": 32, "KV_HEADS": 8}
ROWS = {**HEADS, "GROUP": 4, "TILE": 16, "PAGE": 16, "BLOCK_N": 16, "WINDOW": True, "SOFTCAP": False, "STAGES": 8}
PREFIX = {**HEADS, "GROUP": 4, "TILE": 64, "MEMBERS": 16, "PAGE": 16, "BLOCK_N": 64, "SOFTCAP": True, "STAGES": 2}
CHUNKS = {**HEADS, "PAGE": 16, "BLOCK_M": 64, "BLOCK_N": 32, "WINDOW": True, "SOFTCAP": False, "STAGES": 2}
FUSED = {**HEADS, "GROUP": 4, "TILE": 16, "D": 64, "PAGE": 16, "BLOCK_N": 16, "WINDOW": False, "STAGES": 6}
KERNELS: list[tuple[Any, int, dict[str, Any]]] = [
    (block._add_norm, 4, {"N": 2048, "BLOCK": 2048, "ADD": True, "PARTS": 4}),
    (block._gate, 4, {"N": 8192, "BLOCK": 2048}),
    (block._rotate_store, 4, {**HEADS, "D": 64, "PAGE": 16, "TILE": 64, "NORM": True}),
    (decode_fused._fused_rows, 1, {**FUSED, "NORM": True}),
    (sample._begin, 4, {"PAGE": 16, "BLOCK": 128}),
    (sample._sums, 4, {"BLOCK": 4096, "BLOCKS": 16}),
    (sample._sample, 8, {"CUTS": True, "WIDE": False, "BLOCK": 4096, "BLOCKS": 16}),
    (sample._sample, 8, {"CUTS": False, "WIDE": False, "BLOCK": 4096, "BLOCKS": 16}),
]
for width, padded in ((64, 64), (96, 128)):
    sizes = {"D": width, "WIDTH": padded}
    KERNELS += [
        (decode._rows, 1, {**ROWS, **sizes, "ALONE": True, "SHARED": False}),
        (decode._rows, 1, {**ROWS, **sizes, "ALONE": False, "SHARED": True}),
        (decode._prefix, 4, {**PREFIX, **sizes}),
        (decode._merge, 4, {"HEADS": 32, **sizes, "SHARED": True, "PADDED": 8, "HEAD_TILE": 8}),
        (prefill._chunks, 4, {**CHUNKS, **sizes}),
        (block._store, 4, {"KV_HEADS": 8, **sizes, "PAGE": 16, "TILE": 8}),
    ]


def compiled(kernel: Any, warps: int, constants: dict[str, Any], types: dict[str, str]) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    pointers = [(i,) for i, name in enumerate(names) if signature[name].startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={at: [["tt.divisibility", 16]] for at in pointers},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets in this process")
@pytest.mark.parametrize(
    ("kernel", "warps", "constants"), KERNELS, ids=[f"{k.fn.__name__}-{c.get('D', '')}" for k, _, c in KERNELS]
)
def test_a_kernel_compiles_for_hopper(kernel: Any, warps: int, constants: dict[str, Any]) -> None:
    types = dict(TYPE_OF)
    types["positions_ptr"] = "*i32" if kernel is prefill._chunks else "*i64"
    program = compiled(kernel, warps, constants, types)
    assert program.asm["cubin"] and program.metadata.shared <= 227 << 10


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets in this process")
@pytest.mark.parametrize("tile", [gated.SMALL, gated.MIDDLE, gated.LARGE], ids=["small", "middle", "large"])
def test_the_gated_product_compiles_for_hopper(tile: gated.Tile) -> None:
    blocks = {"BLOCK_M": tile.rows, "BLOCK_N": tile.cols, "BLOCK_K": tile.depth, "STAGES": tile.stages}
    types = {
        "M": "i32",
        "x_desc": f"tensordesc<bf16[{tile.rows}, {tile.depth}]>",
        "weight_desc": f"tensordesc<bf16[{tile.cols}, {tile.depth}]>",
        "out_desc": f"tensordesc<bf16[{tile.rows}, {tile.cols}]>",
    }
    program = compiled(gated._gated, tile.warps, {"N": 8192, "K": 2048, **blocks}, types)
    assert program.asm["cubin"] and program.metadata.shared <= 227 << 10
