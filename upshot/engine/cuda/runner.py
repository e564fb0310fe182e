"""Runs the engine's steps on a GPU: decode steps are CUDA graphs, sampling included. `Engine` calls `run` per step.

The device runs one step ahead of the host: `run` launches a step and returns the results of the previous one. This is
possible because the state of every slot (last id, position, pages, sampling rules) stays on the device (slots.py).

Memory: a CUDA graph reads and writes fixed addresses, namely weights, KV pages, slots, plan tables and `self.logits`.
All of these live as long as the graphs or are checked by `_check_graphs`. Results leave a graph by a copy to the host
on the same stream, before the next replay overwrites them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from triton.errors import TritonError

from upshot.core.errors import UserError
from upshot.engine.cuda.slots import BUCKETS, DecodeBatch, DeviceSlots, upload
from upshot.engine.cuda.steps import (
    COMPILING,
    PREFILL_BLOCK,
    PREFILL_BUCKETS,
    PREFILL_ROWS,
    Cache,
    CudaStep,
    Flight,
    Graph,
    LongRuns,
    PromptGraph,
    Results,
    pack_chunks,
)
from upshot.engine.kernels import sample as sample_kernels
from upshot.engine.kernels.decode import decode_attention, tiles_for
from upshot.engine.kernels.decode_fused import fused_decode_attention
from upshot.engine.kernels.fp8 import E4M3, ScaledRows
from upshot.engine.kernels.long import SHORTEST, cudnn_takes
from upshot.engine.kernels.plain import AttentionOptions
from upshot.engine.kernels.prefill import prefill_attention
from upshot.engine.llama.driver import BlockDriver, Driver
from upshot.engine.llama.select import disagreement, select_driver
from upshot.engine.llama.shape import Shape
from upshot.engine.sampling import ScoreRequest, apply_grammars, by_sequence, given_logprobs, score_request
from upshot.engine.scheduler import Chunk, StepPlan
from upshot.engine.sequence import Rules, Sequence, likeliest
from upshot.engine.swap_slot import SwapSlot, allocate_pages

T = TypeVar("T")

LEAST_HEAD = 16
"""The smallest head that a matrix product on a GPU takes; padding of smaller heads was not tested on one."""
GRAPH_WORK = 1_000_000_000_000
"""Prompt ids × weights of a layer up to which prefill is captured. For more a graph gains nothing, as the GPU takes
much longer than the host, and capturing costs as much as the prefill itself, which also runs without padding then."""


def counts_on_host(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Whether a forward reads values back to the host, which a CUDA graph cannot contain.

    PyTorch's grouped matrix product does, for the number of tokens per expert, in all dtypes but bfloat16.
    """
    experts = any(type(module).__name__.endswith("Experts") for module in model.modules())
    return experts and dtype != torch.bfloat16


class CudaRunner:
    """Executes step plans on one GPU."""

    def __init__(
        self,
        model: torch.nn.Module,
        shape: Shape,
        n_pages: int,
        page_size: int,
        max_running: int,
        settings: Any,
        swap_slot: SwapSlot | None = None,
    ) -> None:
        self.shape, self.page_size = shape, page_size
        self.model = model
        device = shape.device
        self._upload = partial(upload, device=device)
        self.on_gpu = device.type == "cuda"
        """False: the same steps in Triton's interpreter, for tests."""
        self._size = (shape.layers, n_pages, shape.kv_heads, page_size, shape.head_dim)
        if device.type == "cuda" and shape.head_dim < LEAST_HEAD and not settings.exact:
            raise UserError(
                f"the model has heads of {shape.head_dim} numbers; on a GPU the engine needs at least {LEAST_HEAD}: "
                "use fewer heads for the same width (model.tiny.heads), model.exact=true, or the CPU (model.device=cpu)"
            )
        self._eight = settings.kv == "fp8"
        columns = min(-(-shape.max_length // page_size), n_pages) + 1
        self.slots = DeviceSlots(max_running, columns, device)
        self.swap_slot = swap_slot
        self.cache = Cache(*self._pages(), self.slots.table)
        tiles = tiles_for(shape.heads, shape.kv_heads, shape.head_dim, shape.dtype, self._eight, device)
        self.batch = DecodeBatch(self.slots, page_size, tiles)
        self.graphs: dict[tuple[int, int, bool], Graph] = {}
        self.prompt_graphs: dict[tuple[int, int], PromptGraph] = {}
        self.seen: set[tuple[int, ...]] = set()
        """Shapes of the steps run so far."""
        self.pool: Any = None
        """The memory pool that all graphs share."""
        self.flights: deque[Flight] = deque()
        """Launched steps whose results were not collected: at most one between two calls of `run`."""
        self.compiling: list[Future[None]] = []
        """Kernels that threads compile ahead (warm.py); each is launched once and writes to page 0."""
        self.long_run = SHORTEST
        """Prompt chunks with at least this many ids use cuDNN's attention."""
        self.use_graphs = settings.graphs and self.on_gpu and not counts_on_host(model, shape.dtype)
        self.graphed: Driver | None = None
        """The driver whose prefill is captured; None while drivers are being checked."""
        self.most_graphed = 0
        """Ids of the largest prefill step that is captured."""
        self.driver = select_driver(model, shape, settings, kernels=True, check=self._disagreement)
        if isinstance(self.driver, BlockDriver):
            self.graphed = self.driver
            weights = sum(p.numel() for p in self.driver.core.layers[0].parameters())
            sparse = self.driver.layers[0].experts is not None
            self.most_graphed = PREFILL_BUCKETS[-1] if sparse else GRAPH_WORK // weights
        self._pointers = self._weight_pointers()
        self.logits = self._logits_of(max_running) if self.use_graphs else None
        """[rows, vocab] The output buffer that all graphs share; otherwise each would keep logits of its own."""

    def _pages(self) -> tuple[Tensor, Tensor]:
        """Keys and values, zeroed: [layers, pages, kv_heads, page_size, dim] each."""
        if not self._eight:
            return allocate_pages(self._size, self.shape.dtype, self.shape.device, self.swap_slot)
        keys, values = allocate_pages(self._size, torch.uint8, self.shape.device, self.swap_slot)
        return keys.view(E4M3), values.view(E4M3)

    def _logits_of(self, rows: int) -> Tensor:
        """A buffer for the logits of the largest padded step with that many sequences."""
        most = max(next((b for b in buckets if b >= rows), rows) for buckets in (BUCKETS, PREFILL_ROWS))
        dtype = self.driver.lm.get_output_embeddings().weight.dtype
        return torch.empty(most, self.shape.vocab, dtype=dtype, device=self.shape.device)

    def _out(self, rows: int) -> Tensor | None:
        return None if self.logits is None else self.logits[:rows]

    def _disagreement(self, driver: Driver) -> str | None:
        """Compare a driver's logits with the model's own (`select.disagreement`), on pages 1 … of slot 0."""
        from upshot.engine.cuda.warm import compile_ahead

        ready = compile_ahead(self, driver) if self.on_gpu else None

        def drive(driver: Driver, ids: list[int]) -> Tensor:
            nonlocal ready
            if ready is not None:
                ready()
                ready = None
            pages = list(range(1, -(-len(ids) // self.page_size) + 1))
            seq = Sequence(ids, Rules(), pages=pages, slot=0)
            self.cache.table[0, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            cuts = [0, 5, len(ids) - 2, len(ids) - 1, len(ids)]
            try:
                rows = [
                    self._prefill_logits(driver, [Chunk(seq, start, stop, [])], [stop - start - 1])
                    for start, stop in pairwise(cuts)
                ]
            except TritonError as error:  # a kernel does not compile for this shape: another driver may work
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            return torch.cat(rows[1:]).cpu()

        return disagreement(self.model, driver, drive)

    def _weight_pointers(self) -> list[int]:
        """Addresses that graphs read: parameters, pages, merged weights."""
        pointers = [p.data_ptr() for p in self.model.parameters()] + [self.cache.k.data_ptr(), self.cache.v.data_ptr()]
        return pointers + self.driver.pointers()

    def forget(self) -> None:
        """The weights changed: merge adapters again; drop the graphs if anything has moved."""
        self.batch.rows = []
        self.driver.refresh()
        self._check_graphs()

    def _check_graphs(self) -> None:
        pointers = self._weight_pointers()
        if pointers != self._pointers:  # the graphs would read freed memory
            self._drop_graphs()
            self._pointers = pointers

    def _drop_graphs(self) -> None:
        self.graphs.clear()
        self.prompt_graphs.clear()
        self.pool = None

    def park(self, keep_steps: bool = False) -> None:
        """Release the memory (see `Engine.park`)."""
        self._cancel_compiling()
        self.batch.rows = []
        self.cache.k = self.cache.v = torch.zeros(0, dtype=self.shape.dtype, device=self.shape.device)
        if keep_steps:
            return
        self._drop_graphs()
        self.logits = None
        self.driver.release()

    def _cancel_compiling(self) -> None:
        """Let no thread launch a kernel on pages that are about to be released."""
        for kernel in self.compiling:
            if not kernel.cancel():
                kernel.exception()  # waits
        self.compiling.clear()

    def resume(self) -> None:
        """Allocate again what `park` released."""
        self.cache.k, self.cache.v = self._pages()
        if self.logits is None and self.use_graphs:
            self.logits = self._logits_of(self.slots.count)
        self.driver.take()
        self._check_graphs()

    # --- steps

    def run(self, plan: StepPlan) -> Results:
        """Launch a step; returns the results of the one before it, empty if there was none."""
        with torch.inference_mode():
            if plan.copies:
                source, target = self._upload(np.array(plan.copies, dtype=np.int64).T)
                for cache in (self.cache.k, self.cache.v):
                    bits = cache.view(torch.uint8) if self._eight else cache  # indexing does not support 8-bit floats
                    bits[:, target] = bits[:, source]
            flight = self._prefill(plan.chunks, plan.rows) if plan.chunks else self._decode(plan.rows, plan.touched)
        self.flights.append(flight)
        if len(self.flights) > 1:
            results = self.collect()
            assert results is not None
            return results
        return [], [], [], None, []

    @property
    def busy(self) -> bool:
        """Whether a step is still running on the device."""
        last = self.flights[-1] if self.flights else None
        return last is not None and (last.event is None or not last.event.query())

    def collect(self) -> Results | None:
        """Wait for the oldest launched step; returns its results, None if there is none."""
        if not self.flights:
            return None
        flight = self.flights.popleft()
        if flight.event is not None:
            flight.event.synchronize()
        n = len(flight.rows)
        tops = None
        if flight.tops is not None:
            values, order = (x[:n].tolist() for x in flight.tops)
            likely = zip(flight.rows, order, values, strict=True)
            tops = [likeliest(o, v, s.rules.top_logprobs) for s, o, v in likely]
        scored = by_sequence(*flight.scored) if flight.scored else []
        ids, bits = flight.drawn[:, :n]
        return flight.rows, ids.tolist(), bits.view(torch.float32).tolist(), tops, scored

    def _draw(self, logits: Tensor, slots: Tensor, positions: Tensor, cuts: bool) -> Tensor:
        """Sample an id for each row and advance its slot (`kernels.sample.sample`)."""
        state = self.slots
        return sample_kernels.sample(logits, slots, positions, state.rules, state.tokens, state.place, cuts)

    def _flight(self, rows: list[Sequence], drawn: Tensor, logits: Tensor, most: int) -> Flight:
        """Start copying sampled ids and log-probabilities to the host, and the `most` likeliest ids of each row."""
        n = len(rows)
        tops = None
        if most:
            heat = self.slots.rules.temperature[[s.slot for s in rows]]
            scale = torch.where(heat > 0, heat, 1.0)
            values, order = (
                (logits[:n].float() / scale[:, None]).log_softmax(-1).topk(min(most, logits.shape[1]), dim=-1)
            )
            tops = (values.to("cpu"), order.to("cpu"))
        host = self._to_host(drawn)
        return Flight(rows, host, self._event(), tops)

    def _to_host(self, numbers: Tensor) -> Tensor:
        """A copy in pinned memory, complete once the device has reached this point of the stream."""
        if not self.on_gpu:
            return numbers.clone()
        host = torch.empty_like(numbers, device="cpu", pin_memory=True)
        return host.copy_(numbers, non_blocking=True)

    def _event(self) -> torch.cuda.Event | None:
        """An event at this point of the stream; None without a GPU."""
        if not self.on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    # --- prefill

    def _prefill(self, chunks: list[Chunk], rows: list[Sequence]) -> Flight:
        """Launch a prefill step; `rows` sample from the last ids of their chunks."""
        self.slots.sync([c.seq for c in chunks])
        if rows:
            self.slots.sync(rows)
        ends = np.cumsum([c.stop - c.start for c in chunks]) - 1
        last = [int(end) for end, c in zip(ends, chunks, strict=True) for _ in c.samplers]
        wanted = score_request(chunks)
        if wanted is not None:
            return self._score(chunks, rows, last, wanted)
        logits = self._prefill_logits(self.driver, chunks, last)
        return self._sample(rows, logits)

    def _score(self, chunks: list[Chunk], rows: list[Sequence], last: list[int], wanted: ScoreRequest) -> Flight:
        """Prefill with scored chunks; without a graph, since graphs have buffers for few rows of logits."""
        tokens, blocks = pack_chunks(chunks, self.page_size)
        places, ids = (self._upload(np.array(x, dtype=np.int64)) for x in ([*last, *wanted.places], wanted.ids))
        runs = self._long_runs(chunks, blocks)
        logits = self._read(self.driver, self._upload(tokens), self._upload(blocks), places, runs=runs)
        results = given_logprobs(logits[len(last) :], ids, wanted.tops)
        scored = (wanted, tuple(self._to_host(x) for x in results))
        flight = self._sample(rows, logits[: len(last)])
        flight.scored = scored
        return flight

    def _sample(self, rows: list[Sequence], logits: Tensor) -> Flight:
        """Sample the first ids of `rows` from the logits of their last prompt ids."""
        if not rows:  # no prompt ends in this step
            return Flight([], torch.empty(2, 0, dtype=torch.int32), self._event())
        apply_grammars(logits, rows)
        slots, before = self._upload(np.array([[s.slot for s in rows], [len(s.ids) - 1 for s in rows]], dtype=np.int64))
        drawn = self._draw(logits, slots.int(), before, any(s.rules.cuts for s in rows))
        return self._flight(rows, drawn, logits, max(s.rules.top_logprobs for s in rows))

    def _prefill_logits(self, driver: Driver, chunks: list[Chunk], last: list[int]) -> Tensor:
        """Logits [len(last), vocab] of the packed tokens `last`, by a graph if the step is small enough."""
        tokens, blocks = pack_chunks(chunks, self.page_size)
        n, count = tokens.shape[1], blocks.shape[1]
        size = next((b for b in PREFILL_BUCKETS if self.most_graphed >= b >= n), 0)
        rows = next((r for r in PREFILL_ROWS if r >= len(last)), 0)
        # Blocks of queries: the full ones, and a partial one for each chunk. A multiple of four, because rows of the
        # table must begin at multiples of 16 bytes.
        room = -(-(size // PREFILL_BLOCK + rows + 8) // 4) * 4
        runs = self._long_runs(chunks, blocks)
        if runs or not (self.use_graphs and size and rows and count <= room and driver is self.graphed):
            wanted = self._upload(np.array(last, dtype=np.int64))
            return self._read(driver, self._upload(tokens), self._upload(blocks), wanted, runs=runs)
        # Padded tokens write their keys and values to page 0, which no sequence has; padded blocks have no queries.
        wide = np.zeros((3, size), dtype=np.int64)
        wide[:, :n] = tokens
        table = np.zeros((4, room), dtype=np.int32)
        table[:, :count] = blocks
        ends = np.zeros(rows, dtype=np.int64)
        ends[: len(last)] = last
        inputs = (self._upload(wide), self._upload(table), self._upload(ends))
        key = (size, rows)
        if key not in self.prompt_graphs:
            if self._is_new(key):
                return self._read(driver, *inputs, self._out(rows))[: len(last)]
            self.prompt_graphs[key] = self._capture_prompt(size, rows, room)
        graph = self.prompt_graphs[key]
        for place, numbers in zip((graph.tokens, graph.blocks, graph.last), inputs, strict=True):
            place.copy_(numbers)
        graph.graph.replay()
        return graph.logits[: len(last)]

    def _is_new(self, key: tuple[int, ...]) -> bool:
        """Whether a step of this shape has not been run yet, or kernels are still being compiled: then it is run
        without a graph, and the next one is captured.

        Many prompt shapes occur only once, and a capture takes as long as nine decode steps. Also, a capture needs all
        its kernels compiled, which the first run does.
        """
        new = key not in self.seen
        self.seen.add(key)
        return new or bool(COMPILING)

    def _long_runs(self, chunks: list[Chunk], blocks: np.ndarray) -> LongRuns | None:
        """The chunks for cuDNN's attention, None if there are none. It needs lengths on the host: not for graphs."""
        shape = self.shape
        long = [c for c in chunks if c.stop - c.start >= self.long_run]
        if not long or not cudnn_takes(torch.empty(0, shape.head_dim, dtype=shape.dtype, device=shape.device)):
            return None
        short = blocks[:, ~np.isin(blocks[0], [c.seq.slot for c in long])]
        return LongRuns.of(chunks, long, self.cache.table, self._upload(short) if short.size else None)

    def _read(
        self,
        driver: Driver,
        tokens: Tensor,
        blocks: Tensor,
        last: Tensor,
        out: Tensor | None = None,
        runs: LongRuns | None = None,
    ) -> Tensor:
        return driver.logits(tokens[0], tokens[1], self._prompt_step(tokens[1], tokens[2], blocks, runs), last, out)

    def _prompt_step(self, positions: Tensor, cells: Tensor, blocks: Tensor, runs: LongRuns | None = None) -> CudaStep:
        def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            if runs is not None and options.is_plain(runs.longest):
                return runs.attend(q, k, v, options)
            return prefill_attention(q, k, v, self.cache.table, blocks, options, PREFILL_BLOCK)

        return CudaStep(self.cache, self.shape.heads, positions, cells, attend)

    def _capture_prompt(self, size: int, rows: int, room: int) -> PromptGraph:
        """Capture a prefill step of up to `size` ids, with logits of `rows` of them."""
        device = self.shape.device
        tokens = torch.zeros(3, size, dtype=torch.int64, device=device)
        blocks = torch.zeros(4, room, dtype=torch.int32, device=device)
        last = torch.zeros(rows, dtype=torch.int64, device=device)
        graph, logits = self._record(lambda: self._read(self.driver, tokens, blocks, last, self._out(rows)))
        return PromptGraph(graph, tokens, blocks, last, logits)

    # --- decode

    def _decode(self, rows: list[Sequence], touched: list[Sequence]) -> Flight:
        """Launch a decode step: by a graph, unless the shape is new or a row follows a grammar."""
        self.slots.sync(touched)
        if not self.batch.holds(rows):
            self._change_batch(rows)
        bucket = self.batch.bucket
        if self.batch.masked:
            # Grammar masks come from the host between logits and sampling. The scheduler lets a row with a grammar take
            # part only when the host knows all of its ids.
            logits, slots, positions = self._decode_logits(bucket, self.batch.launches)
            apply_grammars(logits, rows)
            return self._flight(rows, self._draw(logits, slots, positions, self.batch.cuts), logits, self.batch.tops)
        key = (bucket, self.batch.launches, self.batch.cuts)
        if not self.use_graphs or (key not in self.graphs and self._is_new(key)):
            return self._flight(rows, *self._decode_body(*key), self.batch.tops)
        if key not in self.graphs:
            self.graphs[key] = self._capture(*key)
        graph = self.graphs[key]
        graph.graph.replay()
        return self._flight(rows, graph.drawn, graph.logits, self.batch.tops)

    def _change_batch(self, rows: list[Sequence]) -> None:
        self.batch.change(rows)

    def _decode_logits(self, bucket: int, launches: int) -> tuple[Tensor, Tensor, Tensor]:
        slots, state = self.batch.slots[:bucket], self.slots
        ids, positions, cells, lengths = sample_kernels.begin(
            slots, state.tokens, state.place, state.table, self.page_size
        )
        step = self._decode_step(positions, cells, slots, lengths, launches)
        return self.driver.logits(ids, positions, step, None, self._out(len(slots))), slots, positions

    def _decode_step(self, positions: Tensor, cells: Tensor, slots: Tensor, lengths: Tensor, launches: int) -> CudaStep:
        table, heads = self.cache.table, self.shape.heads
        plan = self.batch.plan(len(slots), launches)

        def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor | ScaledRows:
            return decode_attention(q, k, v, table, slots, lengths, options, plan, self.driver.narrow)

        def fused(
            qkv: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, norms: Any, options: AttentionOptions
        ) -> Tensor:
            return fused_decode_attention(qkv, k, v, table, slots, lengths, cos, sin, heads, options, norms)

        return CudaStep(self.cache, heads, positions, cells, attend, None if launches else fused)

    def _decode_body(self, bucket: int, launches: int, cuts: bool) -> tuple[Tensor, Tensor]:
        logits, slots, positions = self._decode_logits(bucket, launches)
        return self._draw(logits, slots, positions, cuts), logits

    def _capture(self, bucket: int, launches: int, cuts: bool) -> Graph:
        """Capture a decode step of `bucket` rows, without advancing any slot."""
        with self.batch.dummy_rows():
            graph, (drawn, logits) = self._record(lambda: self._decode_body(bucket, launches, cuts))
        return Graph(graph, drawn, logits)

    def _record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Record `work` as a CUDA graph; it has run once before, so that its kernels are compiled."""
        graph = torch.cuda.CUDAGraph()
        # All captures in a process run on the same PyTorch stream, and cuBLAS keeps a workspace per stream. Without
        # clearing it, this graph would share its workspace with graphs of other engines, which may run concurrently.
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            result = work()
        torch._C._cuda_clearCublasWorkspaces()
        self.pool = self.pool or graph.pool()
        return graph, result
