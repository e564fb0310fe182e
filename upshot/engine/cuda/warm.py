"""Kernels compiled ahead, several at once, so that the first id does not wait for one after the other.

Each is launched once on rows that belong to nobody (the slot behind the last, the page nobody reads). Compilation
happens in C++ and in other processes, so threads do. Once compiled, kernels are in Triton's cache on disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from upshot.engine.cuda.steps import BUCKETS, PREFILL_BLOCK, PREFILL_BUCKETS
from upshot.engine.kernels import fp8
from upshot.engine.kernels import sample as sample_kernels
from upshot.engine.kernels.decode import MEMBERS, SharedPrefixes, decode_attention, tune
from upshot.engine.kernels.decode_fused import fused_decode_attention
from upshot.engine.kernels.gate import gate, tile_for
from upshot.engine.kernels.launch import processors
from upshot.engine.kernels.prefill import prefill_attention
from upshot.engine.kernels.rotary import rotate_store, store
from upshot.engine.llama.fused import FusedDriver, gate_projections

Task = Callable[[], object]
MANY_CORES = 8
"""With fewer, what the first ids do not need is compiled when it is needed, else while they are computed."""


def compile_ahead(runner: Any, driver: Any) -> Callable[[], None]:
    """Start to compile what `driver` will launch; call the result to wait for what the first ids need."""
    import triton.runtime.driver

    triton.runtime.driver.active.get_current_device()  # builds its own helpers, once, before there are threads
    first, later = _common(runner)
    if isinstance(driver, FusedDriver):
        more_first, more_later = _fused(runner, driver)
        first, later = first + more_first, later + more_later
    # With compiled kernels on disk a launch comes at once, and what it reads may not be written yet.
    written = torch.cuda.current_stream(runner.shape.device).record_event()
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())

    def launch(task: Task) -> None:
        device = runner.shape.device
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.inference_mode():
            stream.wait_event(written)
            task()
            stream.synchronize()  # what it reads and writes may be given to others as soon as nobody refers to it

    waiting = [pool.submit(launch, task) for task in first]

    def wait() -> None:
        for each in waiting:
            each.exception()  # what cannot be compiled is reported where it is used
        if (os.cpu_count() or 1) >= MANY_CORES:
            runner.compiling += [pool.submit(launch, task) for task in later]
        pool.shutdown(wait=False)

    return wait


def _common(runner: Any) -> tuple[list[Task], list[Task]]:
    """Kernels every driver needs: reading prompts, attention over pages, sampling."""
    shape, cache, state, device = runner.shape, runner.cache, runner.slots, runner.shape.device
    slots = torch.full((1,), state.count, dtype=torch.int32, device=device)
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    zeros = torch.zeros(8, dtype=torch.int64, device=device)
    q = torch.zeros(1, shape.heads, shape.head_dim, dtype=shape.dtype, device=device)
    kv = torch.zeros(1, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device)
    blocks = torch.zeros(4, 4, dtype=torch.int32, device=device)
    logits = torch.zeros(1, shape.vocab, dtype=shape.dtype, device=device)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    nobody = SharedPrefixes(one, one, torch.full((1, MEMBERS), -1, dtype=torch.int32, device=device), lengths)

    def attend(splits: int, shared: SharedPrefixes | None) -> Task:
        return lambda: decode_attention(q, cache.k[0], cache.v[0], cache.table, slots, lengths, 1.0, splits, shared)

    def draw(cuts: bool) -> Task:
        return lambda: sample_kernels.draw(
            logits, (some, some), slots, zeros[:1], state.rules, state.tokens, state.place, cuts
        )

    some = torch.zeros(1, 1024, device=device)
    first: list[Task] = [
        lambda: prefill_attention(q, cache.k[0], cache.v[0], cache.table, blocks, 1.0, PREFILL_BLOCK),
        attend(16, None),
        lambda: sample_kernels.block_sums(logits, slots, state.rules),
        draw(False),
        lambda: sample_kernels.begin(slots, state.tokens, state.place, cache.table, runner.page_size),
        lambda: store(kv, zeros[:1], cache.k[0]),
    ]
    return first, [attend(1, None), attend(4, None), attend(1, nobody), attend(16, nobody), draw(True)]


def _fused(runner: Any, driver: FusedDriver) -> tuple[list[Task], list[Task]]:
    """Kernels of the fused block."""
    shape, cache, device = runner.shape, runner.cache, runner.shape.device
    layer = driver.layers[0]
    hidden, inner = (layer.down.joined if driver.narrow else layer.down).weight.shape
    x = torch.zeros(1, hidden, dtype=shape.dtype, device=device)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    before = layer.norm1

    def norm(parts: int) -> Task:
        return lambda: driver._join(torch.zeros(parts, 1, hidden, device=device), x, before)

    def fused(rows: int) -> Task:
        slots = torch.full((rows,), runner.slots.count, dtype=torch.int32, device=device)
        qkv = torch.zeros(rows, width, dtype=shape.dtype, device=device)
        return lambda: fused_decode_attention(
            qkv, cache.k[0], cache.v[0], cache.table, slots, torch.ones_like(slots), driver.cos, driver.sin,
            layer.scale, shape.heads, layer.window, layer.head_norms,
        )  # fmt: skip

    first: list[Task] = [
        lambda: driver._join(x, None, before),
        lambda: driver._join(x, x, before),
        norm(4),
        lambda: gate(torch.zeros(1, 2 * inner, dtype=shape.dtype, device=device), narrow=driver.narrow),
        lambda: rotate_store(
            torch.zeros(1, width, dtype=shape.dtype, device=device), zero, zero, driver.cos, driver.sin,
            cache.k[0], cache.v[0], shape.heads, layer.head_norms,
        ),
    ]  # fmt: skip
    kinds = {tune(rows * shape.kv_heads, cache.k[0]): rows for rows in reversed(BUCKETS)}
    products, later = _products8(driver) if driver.narrow else ([], _gates(driver, hidden, inner))
    return first + products, [norm(2), *(fused(rows) for rows in kinds.values()), *later]


def _gates(driver: FusedDriver, hidden: int, inner: int) -> list[Task]:
    """Products with the gate in them."""
    shape, way_up = driver.shape, driver.layers[0].gate_up
    units = processors(shape.device)

    def up(rows: int) -> Task:
        many = torch.zeros(rows, hidden, dtype=shape.dtype, device=shape.device)
        return lambda: gate_projections(many, way_up)

    tiles = {tile_for(rows, hidden, inner, units): rows for rows in reversed([*BUCKETS, *PREFILL_BUCKETS])}
    return [up(rows) for tile, rows in tiles.items() if tile is not None and way_up.joined is not None]


def _products8(driver: FusedDriver) -> tuple[list[Task], list[Task]]:
    """Products in 8 bits: those of the first ids, and those of more rows."""
    device, layer, units = driver.shape.device, driver.layers[0], processors(driver.shape.device)
    found: dict[fp8.Tile8, Task] = {}

    def launch(projections: Any, rows: int, parts: bool) -> None:
        n, width = projections.joined.weight.shape
        tile = fp8.tile_for(rows, n, width, units, parts)
        if tile is not None:
            x = torch.zeros(rows, width, dtype=driver.shape.dtype, device=device)
            found[tile] = lambda: projections.in_parts(x) if parts else projections(x)

    for rows in reversed(BUCKETS):
        for projections in (layer.qkv, layer.gate_up):
            launch(projections, rows, parts=False)
        for projections in (layer.o, layer.down):
            launch(projections, rows, parts=True)
    small = [tile for tile in found if tile.rows == min(other.rows for other in found)]
    return [found[tile] for tile in small], [found[tile] for tile in found if tile not in small]
