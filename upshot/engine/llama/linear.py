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
    return [[parameter for _, parameter in sorted(group, key=lambda placed: placed[0])] for group in groups.values()]


def linear(module: Any, x: Tensor, out: Tensor | None = None) -> Tensor:
    """A plain projection without the module call's overhead; anything else (an adapter) is called.

    The result is written to `out` if one is given.
    """
    if type(module) is not torch.nn.Linear:
        return write_to(out, module(x))
    if out is None:
        return F.linear(x, module.weight, module.bias)
    if module.bias is not None:
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


def join_rows(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    """One tensor of all rows, of which the parameters become views; where they are that already, nothing moves."""
    joined = side_by_side([parameter.data for parameter in parameters])
    if joined is None:
        first = parameters[0].data
        joined = first.new_empty(sum(map(len, parameters)), *first.shape[1:])
        point_at(joined, parameters)
    return joined


def point_at(joined: Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Make parameters the rows of a tensor again; the values of those that lie elsewhere are copied into it."""
    for parameter, rows in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        if parameter.data_ptr() != rows.data_ptr():
            rows.copy_(parameter.data)
            parameter.data = rows


class JoinedProjections:
    """Parameters of several projections, made views of one tensor."""

    def __init__(self, modules: list[Any]) -> None:
        self._weights, self._biases = [m.weight for m in modules], [m.bias for m in modules if m.bias is not None]
        with torch.no_grad():
            self.weight = join_rows(self._weights)
            self.bias = join_rows(self._biases) if self._biases else None

    def refresh(self) -> None:
        """Copy the values back if a parameter was given different storage: captured steps go on reading this one."""
        point_at(self.weight, self._weights)
        if self.bias is not None:
            point_at(self.bias, self._biases)
