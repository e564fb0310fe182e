"""Projections without the overhead of module calls, and q, k, v (or gate, up) as one matrix product.

Used by the drivers and the learner's lean forward. Joined projections become views of one tensor without a copy: they
are the same `Parameter` objects with the same values, which the learner updates in place and the engine reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of projections that have the same input."""


def neighbours(module: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    """All parameters, each once, in lists; those that are joined are in one list, in their order."""
    groups: dict[tuple[str, ...], list[tuple[int, torch.nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        parent, leaf, kind = f"..{name}".rsplit(".", 2)
        together = next((names for names in TOGETHER if leaf in names), (leaf,))
        groups.setdefault((parent, *together, kind), []).append((together.index(leaf), parameter))
    return [[parameter for _, parameter in sorted(group, key=lambda placed: placed[0])] for group in groups.values()]


def linear(module: Any, x: Tensor, out: Tensor | None = None) -> Tensor:
    """A plain projection without the module call's overhead; other modules (adapters) are called.

    The result is written to `out` if it is given.
    """
    if type(module) is not torch.nn.Linear:
        return write_to(out, module(x))
    if out is None:
        return F.linear(x, module.weight, module.bias)
    if module.bias is not None:
        return write_to(out, F.linear(x, module.weight, module.bias))
    return torch.mm(x, module.weight.t(), out=out)


def write_to(out: Tensor | None, x: Tensor) -> Tensor:
    """`x`, copied to `out` if that has its dtype."""
    return x if out is None or out.dtype != x.dtype else out.copy_(x)


def embed(module: Any, ids: Tensor) -> Tensor:
    """A plain embedding without the module call's overhead; other modules (adapters) are called."""
    if type(module) is not torch.nn.Embedding:
        return module(ids)  # type: ignore[no-any-return]
    return F.embedding(ids, module.weight, module.padding_idx)  # the padding row gets no gradient


class OneWeight(Protocol):
    """The weights of several projections in one tensor [rows, columns]."""

    weight: Tensor
    bias: Tensor | None

    def refresh(self) -> None:
        """The projections' weights changed: bring the tensor up to date."""


class Projections:
    """Several projections of one input with one result; joined into one product if all of them are plain."""

    def __init__(self, modules: list[Any], joined: OneWeight | None = None) -> None:
        self.modules = modules
        if joined is None and all(type(m) is torch.nn.Linear for m in modules):
            joined = JoinedProjections(modules)
        self.joined = joined
        """Their weights in one tensor: the parameters themselves or (merged.py) the engine's copy; None: not joined."""

    def __call__(self, x: Tensor) -> Tensor:
        """All results side by side, [rows, n]."""
        if self.joined is not None:
            return F.linear(x, self.joined.weight, self.joined.bias)
        return torch.cat([linear(module, x) for module in self.modules], -1)


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor that these are consecutive rows of; None if they are not."""
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
    """One tensor of all rows, of which the parameters become views; if they are already, nothing is copied."""
    joined = side_by_side([parameter.data for parameter in parameters])
    if joined is None:
        first = parameters[0].data
        joined = first.new_empty(sum(map(len, parameters)), *first.shape[1:])
        point_at(joined, parameters)
    return joined


def point_at(joined: Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Make the parameters views of `joined`; values of those that are elsewhere are copied into it."""
    for parameter, rows in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        if parameter.data_ptr() != rows.data_ptr():
            rows.copy_(parameter.data)
            parameter.data = rows


class JoinedProjections:
    """The parameters of several projections, made views of one tensor."""

    def __init__(self, modules: list[Any]) -> None:
        self._weights, self._biases = [m.weight for m in modules], [m.bias for m in modules if m.bias is not None]
        with torch.no_grad():
            self.weight = join_rows(self._weights)
            self.bias = join_rows(self._biases) if self._biases else None

    def refresh(self) -> None:
        """Copy the values back if a parameter got different storage: CUDA graphs read this one."""
        point_at(self.weight, self._weights)
        if self.bias is not None:
            point_at(self.bias, self._biases)
