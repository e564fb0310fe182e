"""The engine's driver in exact mode, for both runners, and the attention of a step on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from upshot.engine.cpu.store import Span, Store
from upshot.engine.exact import blocks
from upshot.engine.exact.mode import ExactMode
from upshot.engine.kernels.plain import AttentionOptions
from upshot.engine.llama.attention import AttentionStep
from upshot.engine.llama.driver import ModuleDriver
from upshot.engine.llama.shape import Shape


class ExactDriver(ModuleDriver):
    """Calls the model itself inside `ExactMode`, with our attention function."""

    def __init__(self, model: torch.nn.Module, shape: Shape, kernels: bool) -> None:
        super().__init__(model, shape)
        self.mode = ExactMode(kernels)

    def logits(
        self, ids: Tensor, positions: Tensor, step: AttentionStep, last: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Logits of the tokens at the indices `last` (None: all); see `Driver`."""
        with self.mode:
            return super().logits(ids, positions, step, last, out)


class ExactStep:
    """The attention of a step on the CPU, over packed spans of sequences: prefill chunks and decode rows alike."""

    def __init__(self, store: Store, spans: list[Span]) -> None:
        self.store = store
        self.cells = torch.from_numpy(np.concatenate([store.cells(*span) for span in spans]))
        self.positions = torch.from_numpy(np.concatenate([np.arange(start, stop) for _, start, stop in spans]))
        table = store.table([(seq, 0, stop) for seq, _, stop in spans], blocks.KEYS)
        starts, stops = (torch.tensor(x) for x in zip(*((start, stop) for _, start, stop in spans), strict=True))
        self.tiles = blocks.tiles_of(starts, stops - starts, table)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Store and attend; see `AttentionStep`. Sinks have no exact form; the learner's side refuses them before."""
        assert options.sinks is None
        with _disable_current_modes():
            self.store.write(layer, self.cells, k, v)
            return blocks.attend(q, self.store.k[layer], self.store.v[layer], self.tiles, options)
