"""AdamW whose two moments have 8 bits: a quarter of the state.

Each moment is float8 (e4m3: three bits of mantissa) in blocks with a float32 scale each, the second as its root, which
halves the range it needs. What would round to no variance at all is kept at the least there is: a weight whose
gradients are small beside its neighbours' would take a step without measure otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
CHUNK = 1 << 24
"""Weights updated at once, so that little is needed beside the state."""
KIND = torch.float8_e4m3fn
HIGHEST, LEAST = torch.finfo(KIND).max, 2.0**-9
"""The largest number of the kind, and the smallest above zero."""


class EightBitTensor:
    """A float32 tensor in 8 bits, in blocks with a scale each."""

    def __init__(self, count: int, device: torch.device, floor: bool) -> None:
        self.bits = torch.zeros(-(-count // BLOCK) * BLOCK, dtype=KIND, device=device)
        self.scale = torch.zeros(len(self.bits) // BLOCK, device=device)
        self.floor = floor
        """Whether what is not zero may not become it."""

    def read(self, start: int, stop: int) -> Tensor:
        """The numbers in float32; `start` is the first of a block."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        wide = self.bits[first * BLOCK : last * BLOCK].float().view(-1, BLOCK) * self.scale[first:last, None]
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
        self.bits[start : start + scaled.numel()] = scaled.clamp(-HIGHEST, HIGHEST).view(-1).to(KIND)
        self.scale[first : first + len(scale)] = scale

    def state(self) -> dict[str, Tensor]:
        """Its tensors."""
        return {"bits": self.bits.view(torch.uint8), "scale": self.scale}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave."""
        self.bits.view(torch.uint8).copy_(state["bits"])
        self.scale.copy_(state["scale"])


class AdamW8bit:
    """The part of `torch.optim.AdamW` that the learner uses, with moments of 8 bits."""

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        self.param_groups = [{**group, "lr": lr} for group in groups]
        self.betas, self.eps = betas, 1e-8
        self.steps = 0
        self.moments = [
            (EightBitTensor(p.numel(), p.device, floor=False), EightBitTensor(p.numel(), p.device, floor=True))
            for p in self._parameters()
        ]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        self.steps += 1
        moments = iter(self.moments)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    mean_and_root = next(moments)
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, mean_and_root, group["lr"], group["weight_decay"])

    def _update(
        self, parameter: Tensor, grad: Tensor, moments: tuple[EightBitTensor, EightBitTensor], lr: float, decay: float
    ) -> None:
        one, two = self.betas
        whole, slope = parameter.view(-1), grad.reshape(-1)
        for at in range(0, len(whole), CHUNK):
            end = min(at + CHUNK, len(whole))
            g = slope[at:end].float()
            mean = moments[0].read(at, end).lerp_(g, 1 - one)
            root = moments[1].read(at, end).square_().mul_(two).addcmul_(g, g, value=1 - two).sqrt_()
            moments[0].write(at, mean)
            moments[1].write(at, root)
            size = lr / (1 - one**self.steps)
            whole[at:end].mul_(1 - lr * decay)
            whole[at:end].addcdiv_(mean, root.div_((1 - two**self.steps) ** 0.5).add_(self.eps), value=-size)

    def state_dict(self) -> dict[str, Any]:
        """Steps and moments."""
        return {"steps": self.steps, "moments": [(mean.state(), root.state()) for mean, root in self.moments]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.steps = int(state["steps"])
        for moments, saved in zip(self.moments, state["moments"], strict=True):
            for moment, values in zip(moments, saved, strict=True):
                moment.load(values)
