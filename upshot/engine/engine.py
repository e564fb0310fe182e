"""The engine's API: submit requests, run steps, announce new weights. `models/engine_model.py` is its main caller.

On the CPU a step runs on the event loop itself, so batches form in the same order in every run and `breakpoint()`
works. Call `weights_changed` after every optimizer step: KV entries of older weights are never read again. Running
requests keep their ids, whose keys and values are recomputed with the new weights; `Sequence.version` stays the version
that sampled the first id.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError
from upshot.engine.llama.merged import Merging
from upshot.engine.llama.shape import causal_lm, shape_of
from upshot.engine.pages import PagePool
from upshot.engine.scheduler import Scheduler
from upshot.engine.sequence import DONE, Grammar, Rules, Sequence
from upshot.engine.swap_slot import SwapSlot

Token = Callable[[Sequence, int, float], None]
FIRST_CHUNK = 4096
"""Prompt ids in the first prefill chunk on an idle GPU: small, so that the GPU works while the host plans the next."""
LEAST_TEMPERATURE = 1e-10
"""Dividing logits by a smaller temperature would overflow float32."""
SCORE_LOGITS, SCORE_LOGITS_GPU = 1 << 25, 1 << 28
"""Logits that scoring may compute in one step (CPU, GPU): 128 MiB in float32, 512 MiB in bfloat16."""
SETTLED = 64
"""Finished sequences whose pages are freed while a step runs; freeing all at once would delay the next step."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes and modes of the engine."""

    kv_bytes: int = 0
    """Bytes for keys and values; 0: 512 MiB on the CPU, a third of the free memory on a GPU."""
    page_size: int = 16
    """Ids per page."""
    max_running: int = 0
    """Sequences computed at once; 0: 512 on the CPU, 1024 on a GPU."""
    chunk_tokens: int = 0
    """Prompt ids in one prefill step; 0: 2048 on the CPU, 16384 on a GPU."""
    max_waiting: int = 1 << 20
    """Sequences that may wait; more are refused."""
    seed: int = 0
    """Seed for requests without one."""
    lean: bool = True
    """Drive known families layer by layer (llama/driver.py) instead of through the model's forward."""
    merge: Merging = "copy"
    """Whether LoRA adapters are merged into their weights (llama/merged.py). copy: into a copy of the weights. in
    place: into the model's own weights while the engine is not parked; nothing else may use the model meanwhile. never:
    adapters are called as modules, which is slower."""
    weights: Literal["model", "fp8"] = "model"
    """fp8: projections in 8 bits. Projections with the same input share one scale; activations have one per token
    (llama/eight_bit.py; Hopper and later)."""
    kv: Literal["model", "fp8"] = "model"
    """fp8: keys and values in 8 bits, which halves their memory and the bytes a decode step reads (kernels/kv8.py)."""
    kernels: bool = False
    """Run the GPU's kernels on the CPU too (in Triton's interpreter; slow, for tests)."""
    graphs: bool = True
    """Capture decode steps as CUDA graphs (GPU only)."""
    check: bool = True
    """Compare the driver's logits with the model's own forward when the engine is created (llama/select.py)."""
    own_stream: bool = False
    """Run steps concurrently with those of other engines in the process (GPU only); for models that are not trained."""
    exact: bool = False
    """Make log-probabilities bitwise equal to those of the learner's exact forward, whatever the batch; slower
    (exact/)."""


class QueueFull(Exception):
    """More requests wait than `max_waiting`."""


class Engine:
    """Continues token ids with a live transformers model."""

    def __init__(
        self,
        model: torch.nn.Module,
        eos_ids: set[int] | None = None,
        settings: EngineSettings | None = None,
        swap_slot: SwapSlot | None = None,
    ) -> None:
        self.settings = settings or EngineSettings()
        self.swap_slot = swap_slot
        """The memory region of an engine that takes turns with others on a device; None: it has its own memory."""
        self.model = model
        self.shape = shape_of(model)
        self.eos_ids = frozenset(eos_ids if eos_ids is not None else _eos_of(model))
        self.version = self.steps = self.generated = self.prompted = self.scored = self._submitted = 0
        self._loop_task: asyncio.Task[None] | None = None
        self._unseen = 0
        """Prompt ids submitted since the last step."""
        self._committing = False
        """Whether results are being committed: callbacks that submit must not start a step then."""
        self.parked = False
        self.runner: Any
        self.on_gpu = self.shape.device.type == "cuda"
        self.ahead = self.on_gpu or self.settings.kernels
        """Results come back one step late: a step is launched before the results of the previous one are read."""
        self.stream = torch.cuda.Stream(self.shape.device) if self.on_gpu and self.settings.own_stream else None
        n_pages = self._n_pages()
        if self.ahead:
            from upshot.engine.cuda.runner import CudaRunner
            from upshot.engine.exact.cuda_runner import ExactCudaRunner

            with self._own_device(weights_written=True):
                self.runner = (ExactCudaRunner if self.settings.exact else CudaRunner)(
                    model, self.shape, n_pages, self.settings.page_size, self._max_running, self.settings, swap_slot
                )
        else:
            from upshot.engine.cpu.runner import TorchRunner
            from upshot.engine.cpu.store import Store
            from upshot.engine.llama.select import select_driver

            driver = select_driver(model, self.shape, self.settings, kernels=False)
            store = Store(self.shape, n_pages, self.settings.page_size, swap_slot)
            self.runner = TorchRunner(driver, store, self._kv_bytes(), self.settings.exact)
        self.pool = PagePool(n_pages, self.settings.page_size)
        chunk = self.settings.chunk_tokens or (16384 if self.on_gpu else 2048)
        score_rows = max(64, (SCORE_LOGITS_GPU if self.on_gpu else SCORE_LOGITS) // self.shape.vocab)
        self.scheduler = Scheduler(self.pool, self._max_running, chunk, score_rows=score_rows)
        if swap_slot is not None:
            self.scheduler.holds = lambda: swap_slot.holds

    @contextmanager
    def _own_device(self, weights_written: bool = False) -> Iterator[None]:
        """Make the model's GPU the current device, on which kernels, streams and graphs run.

        `weights_written`: make steps on a separate stream wait until the weights are written.
        """
        if self.shape.device.type != "cuda":
            yield
            return
        if weights_written and self.stream is not None:
            self.stream.wait_stream(torch.cuda.default_stream(self.shape.device))
        with torch.cuda.device(self.shape.device), torch.cuda.stream(self.stream) if self.stream else nullcontext():
            yield

    @property
    def _max_running(self) -> int:
        return self.settings.max_running or (1024 if self.on_gpu else 512)

    def _kv_bytes(self) -> int:
        if self.settings.kv_bytes:
            return self.settings.kv_bytes
        return torch.cuda.mem_get_info(self.shape.device)[0] // 3 if self.on_gpu else 512 << 20

    def _n_pages(self) -> int:
        shape = self.shape
        each = 1 if self.settings.kv == "fp8" else shape.dtype.itemsize
        page = 2 * shape.layers * shape.kv_heads * shape.head_dim * self.settings.page_size * each
        # No more pages than all running sequences could fill at the model's full length.
        most = self._max_running * -(-shape.max_length // self.settings.page_size) + 1
        n_pages = min(self._kv_bytes() // page, most)
        if n_pages < 8:
            raise UserError(
                f"engine.kv_bytes={self._kv_bytes()} holds {n_pages} pages of {page} bytes; give it at least {8 * page}"
            )
        return n_pages

    # --- requests

    def submit(
        self,
        ids: list[int],
        rules: Rules,
        n: int = 1,
        grammar: Callable[[], Grammar] | None = None,
        on_token: Token | None = None,
        on_done: Callable[[Sequence], None] | None = None,
    ) -> list[Sequence]:
        """Queue n continuations of `ids`, whose prompt is prefilled once."""
        most, stops = self._room(ids, rules, n), rules.stop_ids | self.eos_ids
        each = [rules.of_row(most, derive_seed(rules.seed, "sample", i), stops) for i in range(n)]
        seqs = [Sequence(list(ids), rule, on_token=on_token, on_done=on_done) for rule in each]
        self._check_vocabulary(seqs[0])
        if grammar is not None:
            for seq in seqs:
                seq.grammar = grammar()
        if n > 1:
            siblings = dict.fromkeys(seqs[1:])
            for seq in seqs:
                seq.siblings = siblings
        self._queue(seqs[0], n)
        return seqs

    def score(
        self, prompt: list[int], given: list[int], top: int = 0, on_done: Callable[[Sequence], None] | None = None
    ) -> Sequence:
        """Queue the log-probabilities of `given` ids after `prompt`; when done they are the sequence's `logprobs`.

        Each is log softmax(logits) at temperature 1. `top`: how many of the likeliest ids to return per position, in
        the sequence's `tops`.
        """
        if not given:
            raise UserError("there is nothing to score; give at least one token id after the prompt")
        rules = Rules(max_tokens=len(given), temperature=0.0, top_logprobs=top)
        if self._room(prompt, rules, 1) < len(given):
            raise UserError(
                f"{len(prompt)} prompt ids and {len(given)} given ids exceed the {self.shape.max_length} that "
                "the model takes"
            )
        seq = Sequence([*prompt, *given], rules, prompt_len=len(prompt), given=True, on_done=on_done)
        self._check_vocabulary(seq)
        self.scored += len(given)
        self._queue(seq, 1)
        return seq

    def _queue(self, leader: Sequence, n: int) -> None:
        """Queue a sequence with its siblings; start a step at once if the GPU is idle and enough ids are waiting."""
        self.scheduler.add(leader)
        self.prompted += len(leader.ids) * n
        self._unseen += len(leader.ids)
        away = self.swap_slot is not None and (self.swap_slot.holds or not self.swap_slot.here)
        if self.on_gpu and self._unseen >= FIRST_CHUNK and not self.runner.busy and not self._committing and not away:
            try:
                self.step()  # the GPU works while the caller prepares more
            except Exception as error:
                self._fail_all(error)  # the step had planned work of other requests, too
                raise

    def _room(self, ids: list[int], rules: Rules, n: int) -> int:
        """How many ids may be sampled after `ids`; raises `UserError` or `QueueFull` if the request cannot be taken."""
        if not ids:
            raise UserError("an empty prompt cannot be continued; give at least one token id")
        if len(ids) >= self.shape.max_length:
            raise UserError(f"the prompt has {len(ids)} ids, but the model takes at most {self.shape.max_length}")
        if rules.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {rules.max_tokens}")
        if rules.temperature != 0 and not LEAST_TEMPERATURE <= rules.temperature < math.inf:
            raise UserError(
                f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE:g} and finite, got {rules.temperature}"
            )
        if not (0 < rules.top_p <= 1 and 0 <= rules.min_p <= 1 and rules.top_k >= 0):
            cuts = f"got {rules.top_p}, {rules.min_p} and {rules.top_k}"
            raise UserError(f"top_p must be above 0 and at most 1, min_p from 0 to 1, top_k at least 0; {cuts}")
        if len(self.scheduler.waiting) + n > self.settings.max_waiting:
            raise QueueFull(f"{len(self.scheduler.waiting)} requests are already waiting")
        most = min(rules.max_tokens, self.shape.max_length - len(ids))
        pages = -(-(len(ids) + most) // self.pool.page_size)
        if pages > self.pool.n_pages - 1:
            raise UserError(
                f"{len(ids)} prompt ids and {most} new ones need {pages} pages, but the cache has "
                f"{self.pool.n_pages - 1}: raise engine.kv_bytes or lower max_tokens"
            )
        return most

    def check_prompt(self, ids: list[int]) -> None:
        """Refuse ids that the model cannot read."""
        if not 0 < len(ids) <= self.shape.max_length:
            raise UserError(f"the prompt has {len(ids)} ids, but the model takes 1 to {self.shape.max_length}")
        self._check_vocabulary(Sequence(ids, Rules()))

    def _check_vocabulary(self, seq: Sequence) -> None:
        try:
            # As uint32, negative ids are large ones.
            wrong = np.maximum.reduce(np.frombuffer(seq.packed(), dtype=np.uint32)) >= self.shape.vocab
        except (OverflowError, struct.error):  # does not fit into 32 bits
            wrong = True
        if wrong:
            high = max(seq.ids)
            outside = high if high >= self.shape.vocab else min(seq.ids)
            raise UserError(f"token id {outside} is outside the vocabulary (0 to {self.shape.vocab - 1})")

    def fresh_seed(self) -> int:
        """A seed for a request without one, derived from the engine's seed and the number of such requests so far."""
        self._submitted += 1
        return derive_seed(self.settings.seed, "request", self._submitted)

    def abort(self, seq: Sequence) -> None:
        """End a sequence now, whether it waits or runs."""
        self.scheduler.finish(seq, "abort")

    def fork(self, seq: Sequence, rules: Rules) -> Sequence:
        """A new sequence that continues from all ids of `seq` so far, on its pages and with a copy of its grammar."""
        self._drain()
        most = self._room(seq.ids, rules, 1)
        # Draws are keyed by (seed, position); forks with the same seed would all sample the same ids.
        seed = derive_seed(rules.seed, "fork", seq.rules.seed, seq.forks)
        seq.forks += 1
        return self.scheduler.fork(seq, rules.of_row(most, seed, rules.stop_ids | self.eos_ids))

    def weights_changed(self) -> int:
        """Call after every change of the weights; returns the new version."""
        self._drain()
        self.version += 1
        self.scheduler.restart()
        if not self.parked:
            with self._own_device(weights_written=True):
                self.runner.forget()
        self.pool.forget()  # on the host, while the device merges adapters
        return self.version

    def park(self, keep_steps: bool = False) -> None:
        """Release the memory of keys, values, CUDA graphs and merged weights; the next step allocates it again.

        No request is lost: running ones keep their ids and are prefilled again. `keep_steps`: keep CUDA graphs and
        merged weights, for an engine whose weights and pages will return to the same addresses.
        """
        if self.parked and (keep_steps or self.swap_slot is None):
            return
        self._drain()
        self.scheduler.restart()
        self.pool.forget()
        with self._own_device():
            self.runner.park(keep_steps)
        self.parked = True
        if not keep_steps:
            self._return_memory()

    def resume(self) -> None:
        """Allocate again what `park` released."""
        if not self.parked:
            return
        if self.swap_slot is None:
            self._return_memory()  # pages need one contiguous block, which PyTorch's cached blocks may fragment
        with self._own_device(weights_written=True):
            self.runner.resume()
        self.parked = False

    def _return_memory(self) -> None:
        """Give PyTorch's cached GPU memory back to the driver."""
        if self.on_gpu:
            torch.cuda.synchronize(self.shape.device)
            torch.cuda.empty_cache()

    # --- steps

    def step(self) -> bool:
        """Compute one step; False if there is nothing left to compute."""
        if self.swap_slot is not None and not self.swap_slot.here and self.scheduler.busy:
            self.swap_slot.enter()
        if self.parked and self.scheduler.busy:
            self.resume()
        first = self.on_gpu and not self.runner.flights
        plan = self.scheduler.plan(min(FIRST_CHUNK, self.scheduler.chunk_tokens) if first else 0)
        self._unseen = 0
        if plan is None:
            if not self._drain() and self.scheduler.busy:
                raise RuntimeError(f"the engine is stuck: {self.stats()}")
            return self.scheduler.busy
        self.steps += 1
        with self._own_device():
            results = self.runner.run(plan)
        self._commit(results)
        self.pool.settle(SETTLED)  # while the step runs
        return True

    def _commit(self, results: Any) -> None:
        rows, ids, logprobs, tops, scored = results
        self.generated += len(rows)
        if tops is not None:
            for seq, top in zip(rows, tops, strict=True):
                if seq.state != DONE:
                    seq.tops.append(top)
        self._committing = True
        try:
            self.scheduler.commit(rows, ids, logprobs, self.version)
            if scored:
                self.scheduler.commit_scores(scored, self.version)
        finally:
            self._committing = False

    def _drain(self) -> bool:
        """Wait for results of steps that are still running and commit them; False if there were none."""
        if not self.ahead:
            return False
        drained = False
        while (results := self.runner.collect()) is not None:
            self._commit(results)
            drained = True
        return drained

    def run_until_done(self) -> None:
        """Step until all requests are done; needs no event loop."""
        while self.scheduler.busy:
            self.step()
        self._drain()

    def wake(self) -> None:
        """Make sure the step loop runs on the current event loop."""
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.get_running_loop().create_task(self._steps())

    async def _steps(self) -> None:
        try:
            await asyncio.sleep(0)
            while self.scheduler.busy:
                if self.swap_slot is None or await self.swap_slot.turn():
                    self.step()
                await asyncio.sleep(0)
            self._drain()
        except Exception as error:
            self._fail_all(error)
            raise

    def _fail_all(self, error: BaseException) -> None:
        """A step failed: end every request with its error, and drop all cached pages."""
        for seq in self.scheduler.all():
            self.scheduler.fail(seq, error)
        self.scheduler.restart()  # also drops planned page copies
        self.pool.forget()
        if not self.parked:
            with self._own_device():
                self.runner.forget()

    async def aclose(self) -> None:
        """Abort everything and stop the step loop."""
        self._drain()
        for seq in list(self.scheduler.all()):
            self.abort(seq)
        if self._loop_task is not None and not self._loop_task.done():
            self._loop_task.cancel()
        if self.settings.merge == "in place":
            self.park()  # restores the model's own weights

    def stats(self) -> dict[str, float]:
        """Counters since the start."""
        return {
            **{name: getattr(self, name) for name in ("steps", "generated", "prompted", "scored")},
            "prefix_hits": self.pool.hits,
            "prefix_lookups": self.pool.lookups,
            "pages_held": self.pool.held,
            "pages_total": self.pool.n_pages - 1,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "preempted": self.scheduler.preempted,
            "version": self.version,
        }


def _eos_of(model: torch.nn.Module) -> set[int]:
    lm = causal_lm(model)
    eos = getattr(getattr(lm, "generation_config", None), "eos_token_id", None)
    if eos is None:
        eos = lm.config.get_text_config().eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
