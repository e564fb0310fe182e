"""Projections of one input as few matrix products, low-rank adapters beside them, and their derivatives.

    y = x Wᵀ + b + (x Aᵀ) Bᵀ

W is q, k and v (or gate and up) side by side where they are views of one tensor (engine/joined.py), else a product
each. A has the adapters of all of them below each other, B is block-diagonal and has the scales in it: so adapters cost
two thin products whatever their number. The thin product is computed first and W's added to it in one go: no other
[tokens, outputs] tensor appears, and the sum is rounded once.

Adapters are kept in float32 and computed with in the model's dtype; their gradients are float32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from upshot.engine.joined import Joined, side_by_side


@dataclass(frozen=True, slots=True)
class Adapter:
    """One low-rank adapter: x ↦ scale · (x downᵀ) upᵀ."""

    down: Tensor
    up: Tensor
    scale: float


def base_of(module: Any) -> nn.Linear | None:
    """The plain projection that a module is, or that a LoRA layer is around; None where it is something else."""
    if type(module) is nn.Linear:
        return module
    if type(module).__module__ == "peft.tuners.lora.layer" and type(module).__name__ == "Linear":
        base = module.base_layer
        return base if type(base) is nn.Linear and not module.fan_in_fan_out else None
    return None


def adapters_of(module: Any) -> list[Adapter] | None:
    """The adapters that work now; None where only the module itself can do what they do (DoRA, dropout …)."""
    if type(module) is nn.Linear or (module.merged and not module.disable_adapters):
        return []
    if module.disable_adapters:
        return None if module.merged else []  # the module takes a merged adapter out again
    found = []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        down, up, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
        odd = name in getattr(module, "lora_variant", {}) or getattr(module, "use_dora", {}).get(name, False)
        if odd or type(down) is not nn.Linear or type(up) is not nn.Linear or up.bias is not None:
            return None
        if dropout.training and getattr(dropout, "p", 0.0) > 0:
            return None
        found.append(Adapter(down.weight, up.weight, float(module.scaling[name])))
    return found


def join(modules: Sequence[Any]) -> None:
    """Make the weights of projections of one input views of one tensor, where that can be."""
    bases = [base_of(module) for module in modules]
    plain = [base for base in bases if base is not None]
    kinds = {(b.weight.dtype, b.weight.device, b.weight.shape[1], b.bias is None) for b in plain}
    if len(plain) == len(bases) and len(kinds) == 1:
        Joined(plain)


def product_of(modules: Sequence[Any]) -> Product | None:
    """The product of these projections as they are now; None where one of them must be called itself."""
    bases = [base_of(module) for module in modules]
    found = [adapters_of(module) if base is not None else None for module, base in zip(modules, bases, strict=True)]
    plain = [base for base in bases if base is not None]
    adapters = [each for each in found if each is not None]
    if len(adapters) < len(modules) or len({base.bias is None for base in plain}) > 1:
        return None
    with torch.no_grad():
        return Product(plain, adapters)


class Product:
    """What several projections of one input are at one time, with their adapters cast."""

    __slots__ = ("adapters", "bias", "down", "ends", "parameters", "up", "weights")

    def __init__(self, bases: Sequence[nn.Linear], adapters: Sequence[Sequence[Adapter]]) -> None:
        weights: list[Tensor] = [base.weight for base in bases]
        biases: list[Tensor] = [base.bias for base in bases if base.bias is not None]
        self.parameters = [*weights, *biases]
        """Whose gradients `gradients` gives, in this order; each adapter's down and up come last."""
        self.ends = [0]
        for weight in weights:
            self.ends.append(self.ends[-1] + weight.shape[0])
        whole = side_by_side(weights)
        self.weights = weights if whole is None else [whole]
        self.bias = None
        if biases:
            joined = side_by_side(biases)
            self.bias = torch.cat(biases) if joined is None else joined
        self.adapters: list[tuple[slice, slice, float]] = []
        """The outputs, the thin columns and the scale of each."""
        self.down: Tensor | None = None
        self.up: Tensor | None = None
        if any(adapters):
            self._cast(adapters)

    def _cast(self, adapters: Sequence[Sequence[Adapter]]) -> None:
        like, ends = self.weights[0], self.ends
        rank = sum(adapter.down.shape[0] for each in adapters for adapter in each)
        self.down, self.up = like.new_empty(rank, like.shape[1]), like.new_zeros(ends[-1], rank)
        at = 0
        for start, stop, each in zip(ends, ends[1:], adapters, strict=False):
            for adapter in each:
                rows, columns = slice(start, stop), slice(at, at + adapter.down.shape[0])
                self.down[columns].copy_(adapter.down)
                torch.mul(adapter.up, adapter.scale, out=self.up[rows, columns])
                self.adapters.append((rows, columns, adapter.scale))
                self.parameters += [adapter.down, adapter.up]
                at = columns.stop

    def _pieces(self, wide: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each weight with its columns of a [tokens, outputs] tensor."""
        if len(self.weights) == 1:
            return [(self.weights[0], wide)]
        return [(w, wide[:, a:b]) for w, a, b in zip(self.weights, self.ends, self.ends[1:], strict=False)]

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """y [tokens, outputs], and x Aᵀ."""
        if self.down is None or self.up is None:
            if len(self.weights) == 1:
                return nn.functional.linear(x, self.weights[0], self.bias), None
            y = x.new_empty(len(x), self.ends[-1])
            for weight, part in self._pieces(y):
                torch.mm(x, weight.t(), out=part)
            return y if self.bias is None else y.add_(self.bias), None
        thin = self.thin(x)
        assert thin is not None
        y = nn.functional.linear(thin, self.up, self.bias)
        for weight, part in self._pieces(y):
            part.addmm_(x, weight.t())
        return y, thin

    def thin(self, x: Tensor) -> Tensor | None:
        """x Aᵀ."""
        return None if self.down is None else x @ self.down.t()

    def thin_gradient(self, dy: Tensor) -> Tensor | None:
        """The gradient of x Aᵀ."""
        return None if self.up is None else dy @ self.up

    def input_gradient(self, dy: Tensor, dthin: Tensor | None) -> Tensor:
        """The gradient of x; a new tensor."""
        dx = None if dthin is None or self.down is None else dthin @ self.down
        for weight, part in self._pieces(dy):
            dx = part @ weight if dx is None else dx.addmm_(part, weight)
        assert dx is not None
        return dx

    def reads_input(self, needs: Sequence[bool]) -> bool:
        """Whether the gradients that are needed are made from x."""
        n = len(self.ends) - 1
        return any(needs[:n]) or any(needs[len(self.parameters) - 2 * len(self.adapters) :: 2])

    def gradients(
        self, needs: Sequence[bool], dy: Tensor, x: Tensor | None, thin: Tensor | None, dthin: Tensor | None
    ) -> list[Tensor | None]:
        """Those of `parameters` that are needed; x may be missing where it is not read."""
        n, first = len(self.ends) - 1, len(self.parameters) - 2 * len(self.adapters)
        spans = [slice(a, b) for a, b in zip(self.ends, self.ends[1:], strict=False)]
        grads: list[Tensor | None] = [None] * len(self.parameters)
        if all(needs[:n]):
            assert x is not None
            whole = dy.t() @ x
            grads[:n] = [whole[span] for span in spans]
        elif any(needs[:n]):
            assert x is not None
            grads[:n] = [dy[:, s].t() @ x if need else None for s, need in zip(spans, needs[:n], strict=True)]
        if any(needs[n:first]):
            total = dy.sum(0)
            grads[n:first] = [total[s] if need else None for s, need in zip(spans, needs[n:first], strict=True)]
        if any(needs[first::2]):
            assert x is not None and dthin is not None
            downs = float32_product(dthin.t(), x)
            grads[first::2] = [downs[columns] for _, columns, _ in self.adapters]
        if any(needs[first + 1 :: 2]):
            assert thin is not None
            ups = float32_product(dy.t(), thin)
            grads[first + 1 :: 2] = [ups[rows, columns] * scale for rows, columns, scale in self.adapters]
        return [
            g.to(p.dtype) if g is not None and need else None
            for g, p, need in zip(grads, self.parameters, needs, strict=True)
        ]


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, not rounded to their dtype."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
