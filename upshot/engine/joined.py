"""Projections of the same input as one matrix product, without a copy of the weights.

q, k and v (and gate and up) become views of one tensor: the same `Parameter` objects, the same values; the learner
updates them in place and the engine reads them at once.
"""

from __future__ import annotations

from typing import Any

import torch


class Joined:
    """Parameters of several projections, made views of one tensor."""

    def __init__(self, modules: list[Any]) -> None:
        self.modules = modules
        with torch.no_grad():
            self.weight = torch.cat([m.weight.data for m in modules])
            self.bias = None if modules[0].bias is None else torch.cat([m.bias.data for m in modules])
        self._point()

    def _point(self) -> None:
        at = 0
        for module in self.modules:
            n = module.weight.shape[0]
            module.weight.data = self.weight[at : at + n]
            if self.bias is not None:
                module.bias.data = self.bias[at : at + n]
            at += n

    def refresh(self) -> None:
        """Take the values back in if somebody gave a parameter other storage."""
        at = 0
        moved = False
        for module in self.modules:
            n = module.weight.shape[0]
            if module.weight.data_ptr() != self.weight[at].data_ptr():
                self.weight[at : at + n].copy_(module.weight.data)
                if self.bias is not None:
                    self.bias[at : at + n].copy_(module.bias.data)
                moved = True
            at += n
        if moved:
            self._point()
