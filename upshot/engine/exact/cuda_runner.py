"""Steps on a GPU in exact mode: one attention kernel for prompts and new tokens, one sampling kernel for all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from upshot.engine.cuda.runner import CudaRunner
from upshot.engine.cuda.steps import CudaStep, LongRuns
from upshot.engine.kernels import exact
from upshot.engine.kernels.plain import AttentionOptions
from upshot.engine.scheduler import Chunk
from upshot.engine.sequence import Sequence


class ExactCudaStep(CudaStep):
    """One step's attention; its kernels are exact by themselves."""

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Store and attend; see `AttentionStep`."""
        with _disable_current_modes():
            return super().attend(*args, **kwargs)


class ExactCudaRunner(CudaRunner):
    """Runs plans on one GPU; what a row gets depends on that row alone."""

    def _long_runs(self, chunks: list[Chunk], blocks: np.ndarray) -> None:
        """None: the library's sums depend on a chunk's length."""

    def _prompt_step(
        self,
        positions: Tensor,
        cells: Tensor,
        blocks: Tensor,
        runs: LongRuns | None = None,
        queries: int = exact.QUERIES,
    ) -> CudaStep:
        def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            # Without sinks: the learner's side has none, and the first forward is compared with it.
            return exact.attend(q, k, v, self.cache.table, blocks, options, queries)

        return ExactCudaStep(self.cache, self.shape.heads, positions, cells, attend)

    def _decode_step(self, positions: Tensor, cells: Tensor, slots: Tensor, lengths: Tensor, launches: int) -> CudaStep:
        """Prompts of one token: every row reads all its pages, as a shared prefix would be summed in another order."""
        rows = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
        blocks = torch.stack([slots, rows, torch.ones_like(rows), lengths - 1])
        return self._prompt_step(positions, cells, blocks, queries=1)

    def _change_batch(self, rows: list[Sequence]) -> None:
        super()._change_batch(rows)
        # Steps differ in the number of rows only, so that each is captured once.
        self.batch.launches, self.batch.cuts = 0, True

    def _draw(self, logits: Tensor, slots: Tensor, positions: Tensor, cuts: bool) -> Tensor:
        """Always by the kernel that can cut: it must not matter whether a neighbour's distribution is cut."""
        logits = exact.align(logits)
        drawn = super()._draw(logits, slots, positions, cuts=True)
        ids, bits = drawn[:, : len(logits)]
        temperature = self.slots.rules.temperature[slots.long()]
        bits.view(torch.float32).copy_(exact.pick_logprobs(logits, ids.long(), temperature))
        return drawn
