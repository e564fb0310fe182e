"""AdamW whose two moments have 8 bits: a quarter of the state.

Each moment is float8 (e4m3: three bits of mantissa) in blocks with a float32 scale each, the second as its root, which
halves the range it needs. What would round to no variance at all is kept at the least there is: a weight whose
gradients are small beside its neighbours' would take a step without measure otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
CHUNK = 1 << 24
"""Weights updated at once, so that little is needed beside the state."""
KIND = torch.float8_e4m3fn
HIGHEST, LEAST = torch.finfo(KIND).max, 2.0**-9
"""The largest number of the kind, and the smallest above zero."""


@dataclass
class EightBitTensor:
    """A float32 tensor in 8 bits, in blocks with a scale each."""

    bits: Tensor
    """The numbers, as bytes: not every way to save or send a tensor knows their own type."""
    scale: Tensor
    floor: bool
    """Whether what is not zero may not become it."""

    @classmethod
    def zeros(cls, count: int, device: torch.device, floor: bool) -> EightBitTensor:
        """As many zeros."""
        blocks = -(-count // BLOCK)
        bits = torch.zeros(blocks * BLOCK, dtype=torch.uint8, device=device)
        return cls(bits, torch.zeros(blocks, device=device), floor)

    def read(self, start: int, stop: int) -> Tensor:
        """The numbers in float32; `start` is the first of a block."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        wide = self.bits.view(KIND)[first * BLOCK : last * BLOCK].float().view(-1, BLOCK) * self.scale[first:last, None]
        return wide.view(-1)[: stop - start]

    def write(self, start: int, numbers: Tensor) -> None:
        """Round numbers into their blocks."""
        pad = -len(numbers) % BLOCK
        blocks = torch.nn.functional.pad(numbers, (0, pad)).view(-1, BLOCK)
        scale = blocks.abs().amax(1) / HIGHEST
        scaled = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        if self.floor:
            scaled = torch.where(blocks > 0, scaled.clamp(min=LEAST), scaled)
        first = start // BLOCK
        self.bits.view(KIND)[start : start + scaled.numel()] = scaled.clamp(-HIGHEST, HIGHEST).view(-1).to(KIND)
        self.scale[first : first + len(scale)] = scale


class AdamW8bit:
    """The part of `torch.optim.AdamW` that the learner uses, with moments of 8 bits."""

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        self.param_groups = [{**group, "lr": lr} for group in groups]
        self.betas, self.eps = betas, 1e-8
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        """Of each parameter that had a gradient."""

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, grad: Tensor, lr: float, decay: float) -> None:
        if parameter not in self.state:
            mean, root = (EightBitTensor.zeros(parameter.numel(), parameter.device, floor) for floor in (False, True))
            tensors = {"mean": mean.bits, "mean_scale": mean.scale, "root": root.bits, "root_scale": root.scale}
            self.state[parameter] = {"step": torch.zeros(()), **tensors}
        state = self.state[parameter]
        state["step"] = state["step"].cpu() + 1  # read on the host: a checkpoint is loaded to the device
        steps, (one, two) = int(state["step"]), self.betas
        means = EightBitTensor(state["mean"], state["mean_scale"], floor=False)
        roots = EightBitTensor(state["root"], state["root_scale"], floor=True)
        whole, slope = parameter.view(-1), grad.reshape(-1)
        for at in range(0, len(whole), CHUNK):
            end = min(at + CHUNK, len(whole))
            g = slope[at:end].float()
            mean_g = means.read(at, end).lerp_(g, 1 - one)
            root_g = roots.read(at, end).square_().mul_(two).addcmul_(g, g, value=1 - two).sqrt_()
            means.write(at, mean_g)
            roots.write(at, root_g)
            size = lr / (1 - one**steps)
            whole[at:end].mul_(1 - lr * decay)
            whole[at:end].addcdiv_(mean_g, root_g.div_((1 - two**steps) ** 0.5).add_(self.eps), value=-size)
