"""AdamW whose state is float32 whatever the model's dtype.

A bfloat16 weight cannot take a step of 1e-6: it rounds away. So the optimizer keeps float32 master weights for
parameters of lower precision and writes them back rounded after each step. The model's own tensors stay the single set
that learner and sampler share.

With `offload` masters, moments and the sums of gradients are on the host, in pinned memory, and updated there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import AdamW

from upshot.config.recipe.train import OptimizerConfig
from upshot.training.learner.optim.adamw_8bit import AdamW8bit


class MasterAdamW:
    """AdamW over float32 masters; for float32 parameters where they are the master is the parameter itself."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], lr: float, config: OptimizerConfig) -> None:
        self.parameters = list(parameters)
        self.offload = config.offload
        self.masters = [self._master(p) for p in self.parameters]
        decayed = [m for m in self.masters if m.ndim >= 2]
        plain = [m for m in self.masters if m.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        # One kernel for all, and nothing beside the state; on the host all cores work at it.
        fused = (self.offload or all(m.is_cuda for m in self.masters)) or None
        small = config.name == "adamw-8bit"
        self.adam: Any = AdamW8bit(groups, lr, config.betas) if small else AdamW(groups, lr, config.betas, fused=fused)

    def _master(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if self.offload:
            host = torch.empty(parameter.shape, dtype=torch.float32, pin_memory=parameter.is_cuda)
            return torch.nn.Parameter(host.copy_(parameter.detach()))
        if parameter.dtype == torch.float32:
            return parameter
        return torch.nn.Parameter(parameter.detach().float())

    def step(self, lr: float) -> None:
        """One update at this learning rate."""
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.gather()
        self.adam.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)

    def gather(self) -> None:
        """Add the parameters' gradients to those of their masters: what micro-batches add up to is a float32 sum."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                grad = parameter.grad.to(master.device)
                master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    def clip(self, most: float) -> float:
        """Scale the gradient down to this norm, where it is larger; the norm it had."""
        return float(torch.nn.utils.clip_grad_norm_(self.masters, most))

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    def state_dict(self) -> dict[str, dict[int, Any]]:
        """By each parameter's place: its shape, Adam's state of it, and its master where that is another tensor."""
        pairs = list(enumerate(zip(self.parameters, self.masters, strict=True)))
        return {
            "shapes": {i: tuple(p.shape) for i, (p, _) in pairs},
            "adam": {i: self.adam.state[m] for i, (_, m) in pairs if m in self.adam.state},
            "masters": {i: m.detach() for i, (p, m) in pairs if m is not p},
        }

    def load_state_dict(self, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Restore what `state_dict` gave."""
        if state["shapes"] != {i: tuple(p.shape) for i, p in enumerate(self.parameters)}:
            raise ValueError("it holds the state of other weights")
        for i, saved in state["adam"].items():
            # Its step, too: where Adam is fused it counts on the device, and elsewhere the masters are on the host.
            device = self.masters[i].device
            self.adam.state[self.masters[i]] = {name: value.to(device, copy=True) for name, value in saved.items()}
        with torch.no_grad():
            for i, value in state["masters"].items():
                self.masters[i].copy_(value)
