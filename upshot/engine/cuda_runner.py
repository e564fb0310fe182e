"""Runs steps on a GPU: CUDA graphs of whole decode steps with sampling inside, one step ahead of the host.

The state of every slot (last id, position, pages, sampling rules) lives on the device, so a step can start before the
ids of the one before it have reached the host: `run` starts a step and returns the results of the previous one.
"""

from __future__ import annotations

from array import array
from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from triton.errors import TritonError

from upshot.engine.changeover import change_back, change_over, compiler_for, keep_true
from upshot.engine.choice import checked_driver, drivers_of
from upshot.engine.compiled import CompiledDriver
from upshot.engine.cuda_steps import (
    BUCKETS,
    PREFILL_BLOCK,
    PREFILL_BUCKETS,
    PREFILL_ROWS,
    Cache,
    CudaStep,
    Flight,
    Graph,
    PromptGraph,
    Results,
    packed_chunks,
)
from upshot.engine.driver import Driver, ModuleDriver, Shape
from upshot.engine.kernels import sample as sample_kernels
from upshot.engine.kernels.decode import MEMBERS, Shared, context_splits, decode_attention
from upshot.engine.kernels.decode_fused import fused_decode_attention
from upshot.engine.kernels.prefill import prefill_attention
from upshot.engine.scheduler import Chunk, Plan
from upshot.engine.sequence import Rules, Sequence
from upshot.engine.sharing import MIN_SHARERS, find_shared


class CudaRunner:
    """Runs plans on one GPU."""

    def __init__(
        self, model: torch.nn.Module, shape: Shape, n_pages: int, page_size: int, max_running: int, settings: Any
    ) -> None:
        self.shape, self.page_size, self.slots = shape, page_size, max_running
        self.model = model
        device = shape.device
        self.on_gpu = device.type == "cuda"
        """Else: the same steps by Triton's interpreter, for tests."""
        size = (shape.layers, n_pages, shape.kv_heads, page_size, shape.head_dim)
        columns = min(-(-shape.max_length // page_size), n_pages) + 1
        self.cache = Cache(
            torch.zeros(size, dtype=shape.dtype, device=device),
            torch.zeros(size, dtype=shape.dtype, device=device),
            torch.zeros(max_running + 1, columns, dtype=torch.int32, device=device),
        )
        self.tokens = torch.zeros(max_running + 1, dtype=torch.int64, device=device)
        self.place = torch.zeros(max_running + 1, dtype=torch.int32, device=device)
        self.rules = sample_kernels.SlotRules(max_running + 1, device)
        self.row_slots = torch.full((max_running + 1,), max_running, dtype=torch.int32, device=device)
        groups = max_running // MIN_SHARERS + 1
        self.shared = Shared(
            torch.zeros(groups, dtype=torch.int32, device=device),
            torch.zeros(groups, dtype=torch.int32, device=device),
            torch.full((groups, MEMBERS), -1, dtype=torch.int32, device=device),
            torch.zeros(max_running + 1, dtype=torch.int32, device=device),
        )
        self.graphs: dict[tuple[int, bool, bool], Graph] = {}
        self.prompt_graphs: dict[tuple[int, int], PromptGraph] = {}
        self.pool: Any = None
        self.flights: deque[Flight] = deque()
        self._holder: list[tuple[Any, int, int]] = [(None, 0, 0)] * (max_running + 1)
        """Per slot: the list of pages that is on the device (one list an admission), how many of them, and the last."""
        self._batch: list[Sequence] = []
        """The rows of the last decode step; the scheduler passes the same list while nobody comes or goes."""
        self._batch_shared = self._batch_cuts = self._batch_masked = False
        self._batch_tops = 0
        self.use_graphs = settings.graphs and self.on_gpu
        self.graphed: Driver | None = None
        """The driver whose reading of prompts is captured; None while drivers are checked."""
        makers = drivers_of(model, shape, settings, kernels=True)
        self.driver = checked_driver(model, makers, self._disagreement if settings.check else None)
        if not isinstance(self.driver, ModuleDriver):
            self.graphed = self.driver
        self.compiler = compiler_for(self.driver, settings)
        """Has decode steps compiled meanwhile; None where there is nothing to gain."""
        self._pointers = self._weight_pointers()

    def _disagreement(self, driver: Driver) -> str | None:
        from upshot.engine.probe import disagreement
        from upshot.engine.warm import compile_ahead

        ready = compile_ahead(self, driver) if self.on_gpu else None

        def driven(driver: Driver, ids: list[int]) -> torch.Tensor:
            if ready is not None:
                ready()
            pages = list(range(1, -(-len(ids) // self.page_size) + 1))
            seq = Sequence(ids, Rules(), pages=pages, slot=0)
            self.cache.table[0, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            cuts = [0, 5, len(ids) - 2, len(ids) - 1, len(ids)]
            try:
                rows = [
                    self._prefill_logits(driver, [Chunk(seq, start, stop, [])], [stop - start - 1])
                    for start, stop in pairwise(cuts)
                ]
            except TritonError as error:  # a kernel that cannot be compiled for this shape: another driver may do
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            return torch.cat(rows[1:]).cpu()

        return disagreement(self.model, driver, driven)

    def _weight_pointers(self) -> list[int]:
        return [p.data_ptr() for p in self.model.parameters()]

    def forget(self) -> None:
        """The weights changed: nothing computed so far may be read again."""
        self._batch = []
        keep_true(self)
        if hasattr(self.driver, "refresh"):
            self.driver.refresh()
        pointers = self._weight_pointers()
        if pointers != self._pointers:  # somebody gave the parameters other storage: captured steps read the old one
            self.graphs.clear()
            self.prompt_graphs.clear()
            self.pool = None
            self._pointers = pointers

    # --- steps

    def run(self, plan: Plan) -> Results:
        """Start a step; the results of the one before it (empty if there was none)."""
        with torch.inference_mode():
            if plan.copies:
                source, target = self._upload(np.array(plan.copies, dtype=np.int64).T)
                for cache in (self.cache.k, self.cache.v):
                    cache[:, target] = cache[:, source]
            flight = self._prefill(plan.chunks, plan.rows) if plan.chunks else self._decode(plan.rows, plan.touched)
        if flight is not None:
            self.flights.append(flight)
        if len(self.flights) > 1:
            results = self.collect()
            assert results is not None
            return results
        return [], [], [], None

    @property
    def busy(self) -> bool:
        """Whether a step that samples is still under way on the device."""
        last = self.flights[-1] if self.flights else None
        return last is not None and (last.event is None or not last.event.query())

    def collect(self) -> Results | None:
        """Wait for the oldest step under way."""
        if not self.flights:
            return None
        flight = self.flights.popleft()
        if flight.event is not None:
            flight.event.synchronize()
        n = len(flight.rows)
        tops = None
        if flight.tops is not None:
            values, order = (x[:n].tolist() for x in flight.tops)
            tops = [
                tuple(zip(o, v, strict=True))[: s.rules.top_logprobs]
                for s, o, v in zip(flight.rows, order, values, strict=True)
            ]
        ids, bits = flight.drawn[:, :n]
        return flight.rows, ids.tolist(), bits.view(torch.float32).tolist(), tops

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        """The array on the device; every row begins at a multiple of 16 bytes, else kernels are compiled twice."""
        width = array.shape[-1]
        if array.ndim == 2 and width % 4:
            array = np.pad(array, ((0, 0), (0, -width % 4)))
        host = torch.from_numpy(np.ascontiguousarray(array))
        there = host.pin_memory().to(self.shape.device, non_blocking=True) if self.on_gpu else host
        return there[..., :width]

    def _sync_slots(self, seqs: list[Sequence]) -> None:
        """Bring the pages and rules of these sequences' slots up to date on the device."""
        holder = self._holder
        stale = []
        for seq in seqs:
            pages = seq.pages
            have = holder[seq.slot]
            if have[0] is not pages or have[1] != len(pages) or have[2] != pages[-1]:
                stale.append(seq)
        if not stale:
            return
        values = array("i")
        fresh: list[Sequence] = []
        columns = self.cache.table.shape[1]
        ends: list[int] = []
        counts: list[int] = []
        for seq in stale:
            pages = seq.pages
            have = holder[seq.slot]
            start = max(0, have[1] - 1) if have[0] is pages else 0
            if have[0] is not pages:
                fresh.append(seq)
            values.fromlist(pages[start:])
            ends.append(seq.slot * columns + len(pages))
            counts.append(len(pages) - start)
            holder[seq.slot] = (pages, len(pages), pages[-1])
        behind = np.array(ends) - np.cumsum(counts)
        cells = np.arange(len(values)) + np.repeat(behind, counts)
        index, value = self._upload(np.stack([cells, np.array(values)]))
        self.cache.table.view(-1).index_copy_(0, index, value.int())
        if fresh:
            self._upload_rules(fresh)

    def _upload_rules(self, seqs: list[Sequence]) -> None:
        rules = [s.rules for s in seqs]
        slots, seeds = self._upload(np.array([[s.slot for s in seqs], [r.seed for r in rules]], dtype=np.int64))
        numbers = self._upload(
            np.array([[r.temperature, r.top_p, r.min_p, r.top_k] for r in rules], dtype=np.float32).T
        )
        self.rules.seeds.index_copy_(0, slots, seeds)
        self.rules.temperature.index_copy_(0, slots, numbers[0])
        self.rules.top_p.index_copy_(0, slots, numbers[1])
        self.rules.min_p.index_copy_(0, slots, numbers[2])
        self.rules.top_k.index_copy_(0, slots, numbers[3].int())

    def _draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, cuts: bool) -> torch.Tensor:
        """Sample an id for each row and move its slot on; see `sample`."""
        return sample_kernels.sample(logits, slots, positions, self.rules, self.tokens, self.place, cuts)

    def _land(self, rows: list[Sequence], drawn: torch.Tensor, logits: torch.Tensor, most: int) -> Flight:
        """Send ids and log-probabilities to the host, and those of the `most` likeliest ids."""
        n = len(rows)
        tops = None
        if most:
            scale = torch.where(self.rules.temperature > 0, self.rules.temperature, 1.0)[[s.slot for s in rows]]
            values, order = (
                (logits[:n].float() / scale[:, None]).log_softmax(-1).topk(min(most, logits.shape[1]), dim=-1)
            )
            tops = (values.to("cpu"), order.to("cpu"))
        if not self.on_gpu:
            return Flight(rows, drawn.clone(), None, tops)
        host = torch.empty_like(drawn, device="cpu", pin_memory=True)
        host.copy_(drawn, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Flight(rows, host, event, tops)

    # --- prompts

    def _prefill(self, chunks: list[Chunk], rows: list[Sequence]) -> Flight | None:
        self._sync_slots([c.seq for c in chunks])
        if rows:
            self._sync_slots(rows)
        ends = np.cumsum([c.stop - c.start for c in chunks]) - 1
        last = [int(end) for end, c in zip(ends, chunks, strict=True) for _ in c.samplers]
        logits = self._prefill_logits(self.driver, chunks, last)
        if not rows:
            return None
        self._mask(rows, logits)
        slots, before = self._upload(np.array([[s.slot for s in rows], [len(s.ids) - 1 for s in rows]], dtype=np.int64))
        drawn = self._draw(logits, slots.int(), before, any(s.rules.cuts for s in rows))
        return self._land(rows, drawn, logits, max(s.rules.top_logprobs for s in rows))

    def _prefill_logits(self, driver: Driver, chunks: list[Chunk], last: list[int]) -> torch.Tensor:
        tokens, blocks = packed_chunks(chunks, self.page_size)
        n, count = tokens.shape[1], blocks.shape[1]
        size = next((b for b in PREFILL_BUCKETS if b >= n), 0)
        rows = next((r for r in PREFILL_ROWS if r >= len(last)), 0)
        room = -(-(size // PREFILL_BLOCK + rows + 8) // 4) * 4
        if not (self.use_graphs and size and rows and count <= room and driver is self.graphed):
            wanted = self._upload(np.array(last, dtype=np.int64))
            return self._read(driver, self._upload(tokens), self._upload(blocks), wanted)
        key = (size, rows)
        if key not in self.prompt_graphs:
            self.prompt_graphs[key] = self._capture_prompt(size, rows, room)
        graph = self.prompt_graphs[key]
        # Padding goes to page 0, which nobody reads; unused blocks have no queries.
        wide = np.zeros((3, size), dtype=np.int64)
        wide[:, :n] = tokens
        table = np.zeros((4, room), dtype=np.int32)
        table[:, :count] = blocks
        ends = np.zeros(rows, dtype=np.int64)
        ends[: len(last)] = last
        graph.tokens.copy_(self._upload(wide))
        graph.blocks.copy_(self._upload(table))
        graph.last.copy_(self._upload(ends))
        graph.graph.replay()
        return graph.logits[: len(last)]

    def _read(self, driver: Driver, tokens: torch.Tensor, blocks: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
        ) -> torch.Tensor:
            return prefill_attention(q, k, v, self.cache.table, blocks, scale, PREFILL_BLOCK, window, softcap)

        step = CudaStep(self.cache, self.shape.heads, tokens[1], tokens[2], attend)
        return driver.logits(tokens[0], tokens[1], step, last)

    def _capture_prompt(self, size: int, rows: int, room: int) -> PromptGraph:
        """Capture the reading of up to `size` prompt ids, of which `rows` are sampled from."""
        device = self.shape.device
        tokens = torch.zeros(3, size, dtype=torch.int64, device=device)
        blocks = torch.zeros(4, room, dtype=torch.int32, device=device)
        last = torch.zeros(rows, dtype=torch.int64, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._read(self.driver, tokens, blocks, last)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            logits = self._read(self.driver, tokens, blocks, last)
        self.pool = self.pool or graph.pool()
        return PromptGraph(graph, tokens, blocks, last, logits)

    def _mask(self, rows: list[Sequence], logits: torch.Tensor) -> None:
        """Apply grammars to logits, in place."""
        from upshot.engine.sampling import apply_bitmask

        for index, seq in enumerate(rows):
            if seq.grammar is not None:
                apply_bitmask(logits, index, seq.grammar.allowed())

    # --- decode

    def _decode(self, rows: list[Sequence], touched: list[Sequence]) -> Flight:
        self._sync_slots(touched)
        if rows is not self._batch:
            self._new_batch(rows)
        if self.compiler is not None:
            change_over(self)
        least = 2 if isinstance(self.driver, CompiledDriver) else 1
        bucket = next((b for b in BUCKETS if b >= max(least, len(rows))), len(rows))
        if self._batch_masked:
            return self._decode_masked(rows, bucket, self._batch_cuts)
        key = (bucket, self._batch_shared, self._batch_cuts)
        if not self.use_graphs:
            return self._land(rows, *self._decode_body(*key), self._batch_tops)
        if key not in self.graphs:
            self.graphs[key] = self._captured(*key)
        graph = self.graphs[key]
        graph.graph.replay()
        return self._land(rows, graph.drawn, graph.logits, self._batch_tops)

    def _new_batch(self, rows: list[Sequence]) -> None:
        """The rows changed: upload their slots and who shares a prefix."""
        n = len(rows)
        self._batch_cuts = any(s.rules.cuts for s in rows)
        self._batch_masked = any(s.grammar is not None for s in rows)
        self._batch_tops = max(s.rules.top_logprobs for s in rows)
        slots = np.full(self.slots + 1, self.slots, dtype=np.int32)
        slots[:n] = [s.slot for s in rows]
        self.row_slots.copy_(self._upload(slots))
        groups, starts = find_shared(rows, self.page_size, MEMBERS)
        self._batch_shared = bool(groups)
        if groups:
            total = len(self.shared.prefix)
            head = np.zeros((2, total), dtype=np.int32)
            members = np.full((total, MEMBERS), -1, dtype=np.int32)
            for index, (leader, length, part) in enumerate(groups):
                head[:, index] = rows[leader].slot, length
                members[index, : len(part)] = part
            own = np.zeros(self.slots + 1, dtype=np.int32)
            own[:n] = starts
            heads = self._upload(head)
            self.shared.leaders.copy_(heads[0])
            self.shared.prefix.copy_(heads[1])
            self.shared.members.copy_(self._upload(members))
            self.shared.starts.copy_(self._upload(own))
        self._batch = rows

    def _decode_logits(self, bucket: int, shared: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slots = self.row_slots[:bucket]
        ids, positions, cells, lengths = sample_kernels.begin(
            slots, self.tokens, self.place, self.cache.table, self.page_size
        )
        groups = bucket // MIN_SHARERS
        together = (
            Shared(
                self.shared.leaders[:groups],
                self.shared.prefix[:groups],
                self.shared.members[:groups],
                self.shared.starts,
            )
            if shared
            else None
        )
        splits = context_splits(bucket * self.shape.kv_heads, slots.device)

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
        ) -> torch.Tensor:
            return decode_attention(q, k, v, self.cache.table, slots, lengths, scale, splits, together, window, softcap)

        def fused(qkv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                  scale: float, window: int, norms: Any) -> torch.Tensor:  # fmt: skip
            return fused_decode_attention(
                qkv, k, v, self.cache.table, slots, lengths, cos, sin, scale, self.shape.heads, window, norms
            )

        plain = splits == 1 and together is None
        step = CudaStep(self.cache, self.shape.heads, positions, cells, attend, fused if plain else None)
        return self.driver.logits(ids, positions, step, None), slots, positions

    def _decode_body(self, bucket: int, shared: bool, cuts: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logits, slots, positions = self._decode_logits(bucket, shared)
        return self._draw(logits, slots, positions, cuts), logits

    def _decode_masked(self, rows: list[Sequence], bucket: int, cuts: bool) -> Flight:
        """A step in which some rows follow a grammar: the mask needs the ids so far, so no graph and no look-ahead."""
        logits, slots, positions = self._decode_logits(bucket, self._batch_shared)
        self._mask(rows, logits)
        return self._land(rows, self._draw(logits, slots, positions, cuts), logits, self._batch_tops)

    def _captured(self, bucket: int, shared: bool, cuts: bool) -> Graph:
        """A captured decode step; an eager one where a compiled one fails."""
        rows, starts = self.row_slots.clone(), self.shared.starts.clone()
        try:
            return self._capture(bucket, shared, cuts)
        except RuntimeError as error:
            if not isinstance(self.driver, CompiledDriver):
                raise
            change_back(self, f"capturing {bucket} rows failed ({error})")
            self.row_slots.copy_(rows)
            self.shared.starts.copy_(starts)
            return self._capture(bucket, shared, cuts)

    def _capture(self, bucket: int, shared: bool, cuts: bool) -> Graph:
        """Capture a decode step. That must not move the sequences on, so the rows are nobody's meanwhile."""
        saved = self.row_slots.clone()
        self.row_slots.fill_(self.slots)
        starts = self.shared.starts.clone()
        self.shared.starts.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decode_body(bucket, shared, cuts)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            drawn, logits = self._decode_body(bucket, shared, cuts)
        self.pool = self.pool or graph.pool()
        self.row_slots.copy_(saved)
        self.shared.starts.copy_(starts)
        return Graph(graph, drawn, logits)
