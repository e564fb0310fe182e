"""Steps on a GPU in exact mode: one attention kernel for prompts and new tokens, one sampling kernel for all rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from upshot.engine.cuda.runner import CudaRunner
from upshot.engine.cuda.steps import CudaStep
from upshot.engine.kernels import exact
from upshot.engine.kernels import sample as sample_kernels
from upshot.engine.llama.driver import Driver
from upshot.engine.sequence import Sequence


class ExactCudaStep(CudaStep):
    """One step's attention; its kernels are exact by themselves."""

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Store and attend; see `attention.Step`."""
        with _disable_current_modes():
            return super().attend(*args, **kwargs)


class ExactCudaRunner(CudaRunner):
    """Runs plans on one GPU; what a row gets depends on that row alone."""

    def _step(self, positions: torch.Tensor, cells: torch.Tensor, blocks: torch.Tensor, queries: int) -> CudaStep:
        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
        ) -> torch.Tensor:
            return exact.attend(q, k, v, self.cache.table, blocks, scale, window, softcap, queries)

        return ExactCudaStep(self.cache, self.shape.heads, positions, cells, attend)

    def _read(
        self,
        driver: Driver,
        tokens: torch.Tensor,
        blocks: torch.Tensor,
        last: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step = self._step(tokens[1], tokens[2], blocks, exact.QUERIES)
        return driver.logits(tokens[0], tokens[1], step, last, out)

    def _change_batch(self, rows: list[Sequence]) -> None:
        super()._change_batch(rows)
        # Steps differ in the number of rows only, so that each is captured once.
        self.batch.shares, self.batch.cuts = False, True

    def _decode_logits(self, bucket: int, shared: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Every row reads all its pages itself: a shared prefix would be summed in another order."""
        slots, state = self.batch.slots[:bucket], self.slots
        ids, positions, cells, lengths = sample_kernels.begin(
            slots, state.tokens, state.place, state.table, self.page_size
        )
        rows = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
        blocks = torch.stack([slots, rows, torch.ones_like(rows), lengths - 1])
        step = self._step(positions, cells, blocks, queries=1)
        return self.driver.logits(ids, positions, step, None, self._out(len(slots))), slots, positions

    def _draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, cuts: bool) -> torch.Tensor:
        """Always by the kernel that can cut: it must not matter whether a neighbour's distribution is cut."""
        logits = exact.aligned(logits)
        drawn = super()._draw(logits, slots, positions, cuts=True)
        ids, bits = drawn[:, : len(logits)]
        bits.view(torch.float32).copy_(exact.picked(logits, ids.long(), self.slots.rules.temperature[slots.long()]))
        return drawn
