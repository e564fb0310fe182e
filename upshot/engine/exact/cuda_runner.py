"""The engine's runner for GPUs in exact mode: one attention kernel for prefill and decode, one form of sampling.

`Engine` creates `ExactCudaRunner` instead of `CudaRunner` if `EngineSettings.exact` is set.
"""

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
    """One step's attention, outside `ExactMode`, since its kernels are batch-invariant themselves."""

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Store and attend; see `AttentionStep`."""
        with _disable_current_modes():
            return super().attend(*args, **kwargs)


class ExactCudaRunner(CudaRunner):
    """Executes step plans on one GPU; a row's result depends on that row alone."""

    def _long_runs(self, chunks: list[Chunk], blocks: np.ndarray) -> None:
        """None, because the order of cuDNN's sums depends on a chunk's length."""

    def _prompt_step(
        self,
        positions: Tensor,
        cells: Tensor,
        blocks: Tensor,
        runs: LongRuns | None = None,
        queries: int = exact.QUERIES,
    ) -> CudaStep:
        def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            # Without sinks: the learner's exact forward refuses them, and the first forward is compared with it.
            return exact.attend(q, k, v, self.cache.table, blocks, options, queries)

        return ExactCudaStep(self.cache, self.shape.heads, positions, cells, attend)

    def _decode_step(self, positions: Tensor, cells: Tensor, slots: Tensor, lengths: Tensor, launches: int) -> CudaStep:
        """Decode rows as prompts of one token; each reads all its pages, as sharing would change the order of sums."""
        rows = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
        blocks = torch.stack([slots, rows, torch.ones_like(rows), lengths - 1])
        return self._prompt_step(positions, cells, blocks, queries=1)

    def _change_batch(self, rows: list[Sequence]) -> None:
        super()._change_batch(rows)
        # Steps then differ in the number of rows only, so that each size is captured once.
        self.batch.launches, self.batch.cuts = 0, True

    def _draw(self, logits: Tensor, slots: Tensor, positions: Tensor, cuts: bool) -> Tensor:
        """Always with `cuts`, as its kernel differs: the result must not depend on whether another row is cut."""
        logits = exact.align(logits)
        drawn = super()._draw(logits, slots, positions, cuts=True)
        ids, bits = drawn[:, : len(logits)]
        temperature = self.slots.rules.temperature[slots.long()]
        bits.view(torch.float32).copy_(exact.pick_logprobs(logits, ids.long(), temperature))
        return drawn
