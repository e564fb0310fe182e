"""Compiles Triton kernels ahead, several at once, so that the first request does not wait for one after another.

cuda/runner.py calls `compile_ahead` when a driver is about to be checked. Each kernel is compiled by launching it once
on the dummy slot, whose pages are all page 0. Compilation runs in C++ and other processes, so threads suffice. Compiled
kernels are in Triton's cache on disk for the next start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from upshot.engine.cuda.slots import BUCKETS
from upshot.engine.cuda.steps import COMPILING, PREFILL_BLOCK, PREFILL_BUCKETS
from upshot.engine.kernels import fp8
from upshot.engine.kernels import sample as sample_kernels
from upshot.engine.kernels.decode import DecodePlan, decode_attention, tune
from upshot.engine.kernels.decode_fused import can_fuse, fused_decode_attention
from upshot.engine.kernels.gate import gate, tile_for
from upshot.engine.kernels.kv8 import in_8_bits
from upshot.engine.kernels.launch import processors
from upshot.engine.kernels.plain import AttentionOptions
from upshot.engine.kernels.prefill import prefill_attention
from upshot.engine.kernels.rotary import rotate_store, store
from upshot.engine.llama.block import Layer
from upshot.engine.llama.fused import FusedDriver, gate_projections

Task = Callable[[], object]
MANY_CORES = 8
"""With fewer cores, kernels that the first step does not need are compiled on demand instead of in the background."""


def compile_ahead(runner: Any, driver: Any) -> Callable[[], None]:
    """Start to compile the kernels of `driver`; call the result to wait for those that the first step needs."""
    import triton.runtime.driver

    triton.runtime.driver.active.get_current_device()  # builds Triton's own helpers once, before there are threads
    first, later = _common(runner, driver)
    if isinstance(driver, FusedDriver):
        more_first, more_later = _fused(runner, driver)
        first, later = first + more_first, later + more_later
    # Kernels that are on disk launch at once, before their inputs may be written on the current stream: wait for them.
    written = torch.cuda.current_stream(runner.shape.device).record_event()
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())

    def launch(task: Task) -> None:
        device = runner.shape.device
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.inference_mode():
            stream.wait_event(written)
            task()
            stream.synchronize()  # its tensors may be freed and reused as soon as the task is done

    def start(tasks: list[Task]) -> list[Future[None]]:
        futures = [pool.submit(launch, task) for task in tasks]
        COMPILING.update(futures)
        for future in futures:
            future.add_done_callback(COMPILING.discard)
        runner.compiling += futures
        return futures

    waiting = start(first)

    def wait() -> None:
        for each in waiting:
            each.exception()  # waits; a kernel that does not compile is reported where it is used
        if (os.cpu_count() or 1) >= MANY_CORES:
            start(later)
        pool.shutdown(wait=False)

    return wait


def _common(runner: Any, driver: Any) -> tuple[list[Task], list[Task]]:
    """Launches of kernels that every driver needs: those for the first step, and others."""
    shape, cache, state, device = runner.shape, runner.cache, runner.slots, runner.shape.device
    slots = torch.full((1,), state.count, dtype=torch.int32, device=device)
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    zeros = torch.zeros(8, dtype=torch.int64, device=device)
    q = torch.zeros(1, shape.heads, shape.head_dim, dtype=shape.dtype, device=device)
    kv = torch.zeros(1, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device)
    blocks = torch.zeros(4, 4, dtype=torch.int32, device=device)
    logits = torch.zeros(1, shape.vocab, dtype=shape.dtype, device=device)

    plain, eight = AttentionOptions(1.0), driver.narrow

    def attend(launches: int) -> Task:
        # With tables of its own: the runner's change meanwhile, and would name rows that q does not have.
        live = runner.batch.plan(1, launches)
        narrow, rows = torch.zeros_like(live.narrow), torch.zeros_like(live.rows)
        plan = DecodePlan(narrow, None if live.wide is None else torch.zeros_like(live.wide), rows, live.parts)
        return lambda: decode_attention(q, cache.k[0], cache.v[0], cache.table, slots, lengths, plain, plan, eight)

    def draw(cuts: bool) -> Task:
        return lambda: sample_kernels.draw(
            logits, (some, some), slots, zeros[:1], state.rules, state.tokens, state.place, cuts
        )

    some = torch.zeros(1, 1024, device=device)
    first: list[Task] = [
        lambda: prefill_attention(q, cache.k[0], cache.v[0], cache.table, blocks, plain, PREFILL_BLOCK),
        attend(1),
        lambda: sample_kernels.block_sums(logits, slots, state.rules),
        draw(False),
        lambda: sample_kernels.begin(slots, state.tokens, state.place, cache.table, runner.page_size),
    ]
    if not in_8_bits(cache.k):  # in 8 bits only the fused driver runs, which uses rotate_store
        first.append(lambda: store(kv, zeros[:1], cache.k[0]))
    return first, [attend(0), *([attend(2)] if runner.batch.tiles.wide else []), draw(True)]


def _fused(runner: Any, driver: FusedDriver) -> tuple[list[Task], list[Task]]:
    """Launches of the fused driver's kernels: those for the first step, and others."""
    if driver.narrow:
        return _fused8(runner, driver)
    shape, device = runner.shape, runner.shape.device
    layer = driver.layers[0]
    hidden = driver.core.norm.weight.shape[0]
    x = torch.zeros(1, hidden, dtype=shape.dtype, device=device)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

    def join(y: torch.Tensor, h: torch.Tensor | None = x, after: Any = layer.after2) -> Task:
        return lambda: driver._join(y, h, after, layer.norm2)

    def norm(parts: int) -> Task:
        return join(torch.zeros(parts, 1, hidden, device=device))

    def attend(rows: int, fused: bool) -> Task:
        qkv = torch.zeros(rows, width, dtype=shape.dtype, device=device)
        return lambda: _read_qkv(runner, driver, qkv, rows, fused)

    first = [join(x, None, None), join(x), norm(4), attend(1, False)]
    more = [norm(2), *(attend(rows, True) for rows in _tunings(runner, driver).values())]
    if layer.experts is None:
        gates, larger = _gates(layer, hidden, driver)
        first, more = first + gates, more + larger
    return first, more


def _tunings(runner: Any, driver: FusedDriver) -> dict[Any, int]:
    """The tunings of fused decode attention, each with a batch size that uses it."""
    layer = driver.layers[0]
    if not can_fuse(runner.shape.head_dim, driver.tables[layer.rotation][0], layer.head_norms):
        return {}
    return {tune(rows * runner.shape.kv_heads, runner.cache.k[0]): rows for rows in reversed(BUCKETS)}


def _read_qkv(runner: Any, driver: FusedDriver, qkv: Any, rows: int, fused: bool) -> None:
    """Rotate and store dummy rows of the joined qkv product in page 0; `fused`: attend as well."""
    shape, cache, layer = runner.shape, runner.cache, driver.layers[0]
    cos, sin = driver.tables[layer.rotation]
    if not fused:
        page = torch.zeros(rows, dtype=torch.int64, device=shape.device)
        rotate_store(qkv, page, page, cos, sin, cache.k[0], cache.v[0], shape.heads, layer.head_norms)
        return
    slots = torch.full((rows,), runner.slots.count, dtype=torch.int32, device=shape.device)
    fused_decode_attention(
        qkv, cache.k[0], cache.v[0], cache.table, slots, torch.ones_like(slots), cos, sin,
        shape.heads, layer.attention, layer.head_norms,
    )  # fmt: skip


def _fused8(runner: Any, driver: FusedDriver) -> tuple[list[Task], list[Task]]:
    """Products in 8 bits with the kernels that read them; the form of a product depends on its number of rows."""
    shape, layer = driver.shape, driver.layers[0]
    hidden, dtype, device = driver.core.norm.weight.shape[0], shape.dtype, shape.device

    def run(name: str, rows: int, fused: bool = False) -> None:
        projections, back = getattr(layer, name), name in ("o", "down")
        x = torch.zeros(rows, projections.joined.weight.shape[1], dtype=dtype, device=device)
        y = projections.in_parts(x) if back else projections(x)
        if back:
            driver._join(y, torch.zeros(rows, hidden, dtype=dtype, device=device), layer.after2, layer.norm2)
        elif name == "gate_up":
            gate(y, driver.options.act, narrow=True)
        else:
            _read_qkv(runner, driver, y, rows, fused)

    def each(rows: int) -> list[Task]:
        return [partial(run, name, rows) for name in ("qkv", "o", "gate_up", "down")]

    few, many = fp8.MOST_TILED, fp8.MOST_UNSCALED
    begin = partial(driver._join, torch.zeros(1, hidden, dtype=dtype, device=device), None, None, layer.norm2)
    attend = [partial(run, "qkv", rows, True) for rows in (*_tunings(runner, driver).values(), few + 1)]
    return [begin, *each(1), *each(few + 1)], [*each(few), *each(many + 1), *attend]


def _gates(layer: Layer, hidden: int, driver: FusedDriver) -> tuple[list[Task], list[Task]]:
    """Launches of the MLP gate's kernels: those for the first step, and others."""
    shape, act = driver.shape, driver.options.act
    inner = layer.down.weight.shape[1]

    def up(rows: int) -> Task:
        many = torch.zeros(rows, hidden, dtype=shape.dtype, device=shape.device)
        return lambda: gate_projections(many, layer.gate_up, act)

    alone: Task = lambda: gate(torch.zeros(1, 2 * inner, dtype=shape.dtype, device=shape.device), act)  # noqa: E731
    sizes = reversed([*BUCKETS, *PREFILL_BUCKETS])
    tiles = {tile_for(rows, hidden, inner, processors(shape.device)): rows for rows in sizes}
    joined = layer.gate_up.joined is not None
    return [alone], [up(rows) for tile, rows in tiles.items() if tile is not None and joined]
