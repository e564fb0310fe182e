"""Projections: plain ones without the module call's overhead, those of one input as one matrix product.

q, k and v (and gate and up) become views of one tensor, without a copy of the weights: the same `Parameter` objects,
the same values; the learner updates them in place and the engine reads them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections of one input."""


def neighbours(module: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    """All parameters, each once, those that are joined in one list and in their order."""
    groups: dict[tuple[str, ...], list[tuple[int, torch.nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        parent, leaf, kind = f"..{name}".rsplit(".", 2)
        together = next((names for names in TOGETHER if leaf in names), (leaf,))
        groups.setdefault((parent, *together, kind), []).append((together.index(leaf), parameter))
    return [[parameter for _, parameter in sorted(group, key=lambda found: found[0])] for group in groups.values()]


def linear(module: Any, x: Tensor, out: Tensor | None = None) -> Tensor:
    """A plain projection without the module call's overhead; anything else (an adapter) is called.

    The result is written to `out` if one is given.
    """
    if type(module) is not torch.nn.Linear:
        return write_to(out, module(x))
    if out is None or module.bias is not None:
        return write_to(out, F.linear(x, module.weight, module.bias))
    return torch.mm(x, module.weight.t(), out=out)


def write_to(out: Tensor | None, x: Tensor) -> Tensor:
    """`x`, written to `out` if there is one of its dtype."""
    return x if out is None or out.dtype != x.dtype else out.copy_(x)


def embed(module: Any, ids: Tensor) -> Tensor:
    """A plain embedding without the module call's overhead; anything else (an adapter) is called."""
    if type(module) is not torch.nn.Embedding:
        return module(ids)  # type: ignore[no-any-return]
    return F.embedding(ids, module.weight, module.padding_idx)  # whose row has no gradient


class OneWeight(Protocol):
    """Weights of several projections in one tensor."""

    weight: Tensor
    bias: Tensor | None

    def refresh(self) -> None:
        """The projections' weights changed."""


class Projections:
    """Several projections of one input, side by side in one result; joined where all of them are plain."""

    def __init__(self, modules: list[Any], joined: OneWeight | None = None) -> None:
        self.modules = modules
        if joined is None and all(type(m) is torch.nn.Linear for m in modules):
            joined = JoinedProjections(modules)
        self.joined = joined
        """Their weights in one tensor, their own or (merged.py) the engine's."""

    def __call__(self, x: Tensor) -> Tensor:
        """All results, one after the other in each row."""
        if self.joined is not None:
            return F.linear(x, self.joined.weight, self.joined.bias)
        return torch.cat([linear(module, x) for module in self.modules], -1)


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose rows these are, one after the other, if they are views of one."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    home, end, rows = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != home or not tensor.is_contiguous():
            return None
        if tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:]:
            return None
        end += tensor.numel() * tensor.element_size()
        rows += tensor.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _join(tensors: list[Tensor]) -> Tensor:
    """One tensor of all rows: the one they are already views of, or a new one."""
    joined = side_by_side(tensors)
    return torch.cat(tensors) if joined is None else joined


class JoinedProjections:
    """Parameters of several projections, made views of one tensor; joined a second time, they stay where they are."""

    def __init__(self, modules: list[Any]) -> None:
        self.modules = modules
        with torch.no_grad():
            self.weight = _join([m.weight.data for m in modules])
            self.bias = None if modules[0].bias is None else _join([m.bias.data for m in modules])
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
        """Copy the values back if a parameter was given different storage."""
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
