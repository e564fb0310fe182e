"""Projections of one input as few matrix products, low-rank adapters beside them, and their derivatives.

    y = x Wᵀ + b + (x Aᵀ) Bᵀ

W is q, k and v (or gate and up) side by side where they are views of one tensor (engine/llama/linear.py), else a
product each. A has the adapters of all of them below each other, B is block-diagonal and has the scales in it: so
adapters cost two thin products whatever their number. The thin product is computed first and W's added to it in one go:
no other [tokens, outputs] tensor appears, and the sum is rounded once.

Adapters are kept in float32 and computed with in the model's dtype; their gradients are float32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from upshot.engine.llama.linear import JoinedProjections, side_by_side
from upshot.engine.llama.lora import Adapter, linear_below, separate_adapters


def join(modules: Sequence[Any]) -> None:
    """Make the weights of projections of one input views of one tensor, where that can be."""
    bases = [linear_below(module) for module in modules]
    plain = [base for base in bases if base is not None]
    kinds = {(b.weight.dtype, b.weight.device, b.weight.shape[1], b.bias is None) for b in plain}
    if len(plain) == len(bases) and len(kinds) == 1:
        JoinedProjections(plain)


def products_of(
    modules: Sequence[Any], before: Product | CalledProjections | None = None
) -> Product | CalledProjections:
    """These projections as they are now: as one product, or called, where one of them can do what only it can.

    What they were `before` is given back where nothing changed.
    """
    if isinstance(before, Product) and before.holds(modules):
        return before
    bases = [base for base in map(linear_below, modules) if base is not None]
    if len(bases) < len(modules) or len({base.bias is None for base in bases}) > 1:
        return CalledProjections(modules)
    adapters = [each for each in map(separate_adapters, modules) if each is not None]
    if len(adapters) < len(modules):
        return CalledProjections(modules)
    with torch.no_grad():
        return Product(bases, adapters)


Gradients = list[tuple[Tensor, Tensor]]
"""Parameters with their gradients."""


class Product:
    """What several projections of one input are at one time, with their adapters cast."""

    random = False

    def __init__(self, bases: Sequence[nn.Linear], adapters: Sequence[Sequence[Adapter]]) -> None:
        weights: list[Tensor] = [base.weight for base in bases]
        biases: list[Tensor] = [base.bias for base in bases if base.bias is not None]
        self.parameters = [*weights, *biases]
        """Weights, biases, and each adapter's down and up."""
        self.sizes = [weight.shape[0] for weight in weights]
        self.ends = [sum(self.sizes[:i]) for i in range(len(weights) + 1)]
        self.weights = _rows(weights)
        copied = biases and len(_rows(biases)) > 1
        self.bias = None if not biases else torch.cat(biases) if copied else _rows(biases)[0]
        self.adapters: list[tuple[slice, slice, float]] = []
        """The outputs, the thin columns and the scale of each."""
        self.down: Tensor | None = None
        self.up: Tensor | None = None
        self.places = [] if copied or any(adapters) else [p.data_ptr() for p in self.parameters]
        """Where the weights are; empty where something was copied."""
        if any(adapters):
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
        self.needs = [p.requires_grad for p in self.parameters]
        n, first = len(weights), len(self.parameters) - 2 * len(self.adapters)
        self.wants_weights, self.wants_all = any(self.needs[:n]), all(self.needs[:n])
        self.wants_biases, self.wants_downs = any(self.needs[n:first]), any(self.needs[first::2])
        self.wants_ups = any(self.needs[first + 1 :: 2])
        self.simple = self.wants_all and first == n and not self.adapters
        """Whether the gradients of all weights are the only ones."""
        self.reads = self.wants_weights or self.wants_downs
        """Whether gradients are made from the input."""

    def holds(self, modules: Sequence[Any]) -> bool:
        """Whether the projections are still these, plain, and where they were."""
        now = [module._parameters.get(kind) for kind in ("weight", "bias") for module in modules]
        return (
            bool(self.places)
            and [id(p) for p in now if p is not None] == [id(p) for p in self.parameters]
            and self.places == [p.data_ptr() for p in self.parameters]
            and self.needs == [p.requires_grad for p in self.parameters]
        )

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that have a gradient."""
        return [p for p, need in zip(self.parameters, self.needs, strict=True) if need]

    def _pieces(self, wide: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each weight with its columns of a [tokens, outputs] tensor."""
        if len(self.weights) == 1:
            return [(self.weights[0], wide)]
        return list(zip(self.weights, torch.split_with_sizes(wide, self.sizes, 1), strict=True))

    def outputs(self, x: Tensor, keep: bool) -> tuple[Tensor, Any]:
        """y [tokens, outputs], and what its derivative needs beside x: x Aᵀ."""
        if self.down is None or self.up is None:
            if len(self.weights) == 1:
                return nn.functional.linear(x, self.weights[0], self.bias), None
            y = x.new_empty(x.shape[0], self.ends[-1])
            for weight, part in self._pieces(y):
                torch.mm(x, weight.t(), out=part)
            return y if self.bias is None else y.add_(self.bias), None
        thin = x @ self.down.t()
        y = nn.functional.linear(thin, self.up, self.bias)
        for weight, part in self._pieces(y):
            part.addmm_(x, weight.t())
        return y, thin

    def without_result(self, x: Tensor) -> tuple[Tensor, Any]:
        """As `outputs`, where only its derivative will be asked for: y has no values."""
        return x.new_empty(x.shape[0], self.ends[-1]), None if self.down is None else x @ self.down.t()

    def input_gradient(self, dy: Tensor, kept: Any) -> tuple[Tensor, Any]:
        """The gradient of x (a new tensor), and of x Aᵀ."""
        if self.down is None or self.up is None:
            if len(self.weights) == 1:
                return dy @ self.weights[0], None
            dthin = dx = None
        else:
            dthin = dy @ self.up
            dx = dthin @ self.down
        for weight, part in self._pieces(dy):
            dx = part @ weight if dx is None else dx.addmm_(part, weight)
        assert dx is not None
        return dx, dthin

    def thin_gradient(self, dy: Tensor) -> Any:
        """The gradient of x Aᵀ alone."""
        return None if self.up is None else dy @ self.up

    def gradients(self, dy: Tensor, x: Tensor, kept: Any, dthin: Any) -> Gradients:
        """Those of the parameters that are trained."""
        if self.simple:
            whole = torch.mm(dy.t(), x)
            return list(zip(self.parameters, torch.split_with_sizes(whole, self.sizes), strict=True))
        n, first = len(self.sizes), len(self.parameters) - 2 * len(self.adapters)
        grads: list[Tensor | None] = [None] * len(self.parameters)
        if self.wants_all:
            grads[:n] = torch.split_with_sizes(dy.t() @ x, self.sizes)
        elif self.wants_weights:
            parts = zip(dy.split(self.sizes, 1), self.needs[:n], strict=True)
            grads[:n] = [part.t() @ x if need else None for part, need in parts]
        if self.wants_biases:
            grads[n:first] = dy.sum(0).split(self.sizes)
        if self.wants_downs:
            downs = float32_product(dthin.t(), x)
            grads[first::2] = [downs[columns] for _, columns, _ in self.adapters]
        if self.wants_ups:
            ups = float32_product(dy.t(), kept)
            grads[first + 1 :: 2] = [ups[rows, columns] * scale for rows, columns, scale in self.adapters]
        of_each = zip(self.parameters, grads, self.needs, strict=True)
        return [(p, g if g.dtype == p.dtype else g.to(p.dtype)) for p, g, need in of_each if need and g is not None]


class CalledProjections:
    """Projections that must be called themselves (DoRA, dropout, 4-bit weights …): autograd has their derivatives."""

    random = True
    reads = False

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = modules
        self.trained: list[Tensor] = [p for module in modules for p in module.parameters() if p.requires_grad]

    def outputs(self, x: Tensor, keep: bool) -> tuple[Tensor, Any]:
        """As `Product.outputs`; kept are x and y with their graph."""
        with torch.set_grad_enabled(keep):
            x = x.detach().requires_grad_(keep)
            outputs = [module(x) for module in self.modules]
            y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return y.detach(), (x, y)

    def without_result(self, x: Tensor) -> tuple[Tensor, Any]:
        """As `outputs`: the graph comes with the values."""
        return self.outputs(x, True)

    def input_gradient(self, dy: Tensor, kept: Any) -> tuple[Tensor, Any]:
        """The gradient of x, and those of the parameters."""
        x, y = kept
        dx, *grads = torch.autograd.grad(y, [x, *self.trained], dy, allow_unused=True)
        return dx.contiguous(), grads

    def gradients(self, dy: Tensor, x: Tensor, kept: Any, grads: Any) -> Gradients:
        """Those of the parameters that are trained."""
        return [(p, g) for p, g in zip(self.trained, grads, strict=True) if g is not None]


def _rows(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, as one where they are rows of one."""
    whole = side_by_side(tensors)
    return tensors if whole is None else [whole]


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, not rounded to their dtype."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
