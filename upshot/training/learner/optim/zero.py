"""An optimizer over several ranks: each keeps masters, moments and gradient sums of its share of the parameters.

The weights are whole in every rank: its engine needs them so. What is too large to have several times, two to eight
times the weights, is there once: every parameter belongs to one rank. After each micro-batch gradients are summed there
in float32, that rank takes the step, and the others get the new weights from it.

A checkpoint holds the state that one rank with all parameters would have, so that any number of ranks can go on from
it: `merge_states` and `part_of_state` go from one to the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from upshot.training.learner.distributed.ranks import Ranks, assign
from upshot.training.learner.optim.adamw import MasterAdamW
from upshot.training.learner.snapshot import on_host

Parameters = Sequence[torch.nn.Parameter]
State = Mapping[str, Mapping[int, Any]]
"""What there is of each parameter, by its place: shape, moments, master."""


class ShardedAdamW:
    """`MasterAdamW`, of which each rank has a share; all begin with the first rank's weights."""

    def __init__(self, parameters: Parameters, ranks: Ranks, make: Callable[[Parameters], MasterAdamW]) -> None:
        self.parameters = list(parameters)
        self.ranks = ranks
        self.owners = assign([p.numel() for p in self.parameters], ranks.size)
        self.places = [i for i, owner in enumerate(self.owners) if owner == ranks.rank]
        """Which parameters are this rank's."""
        for parameter in self.parameters:
            ranks.collectives.broadcast(parameter.data, src=0)
        self.inner = make([self.parameters[i] for i in self.places]) if self.places else None
        self._sums: dict[int, Tensor] = {}

    @property
    def masters(self) -> list[torch.nn.Parameter]:
        """What this rank updates."""
        return self.inner.masters if self.inner is not None else []

    def gather(self) -> None:
        """Sum what the ranks have found in a micro-batch; ranks that had none call this, too."""
        present = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.float32)
        present = present.to(self.parameters[0].device)
        self.ranks.collectives.all_reduce(present)
        masters = dict(zip(self.places, self.masters, strict=True))
        for i, anywhere in enumerate(present.tolist()):
            if not anywhere:
                continue  # as in one process: without a gradient a weight does not even decay
            parameter, owner = self.parameters[i], self.owners[i]
            grad = parameter.grad.float() if parameter.grad is not None else torch.zeros_like(parameter).float()
            parameter.grad = None
            self.ranks.collectives.reduce(grad, dst=owner)
            if i in masters:
                summed = grad.to(masters[i].device)
                self._sums[i] = self._sums[i].add_(summed) if i in self._sums else summed

    def clip(self, most: float) -> float:
        """Scale the gradient of all ranks down to this norm, where it is larger; the norm it had."""
        for i, master in zip(self.places, self.masters, strict=True):
            master.grad = self._sums.pop(i, None)
        grads = [master.grad for master in self.masters if master.grad is not None]
        squared = torch.zeros(1, dtype=torch.float64, device=self.parameters[0].device)
        if grads:
            squared += torch.nn.utils.get_total_norm(grads).to(squared).square()
        self.ranks.collectives.all_reduce(squared)
        norm = math.sqrt(float(squared)) if torch.isfinite(squared).all() else float(squared)
        if grads and math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self.masters, most, torch.tensor(norm))
        return norm

    def step(self, lr: float) -> None:
        """One update at this learning rate; afterwards all ranks have the new weights."""
        if self.inner is not None:
            self.inner.step(lr)
        for parameter, owner in zip(self.parameters, self.owners, strict=True):
            self.ranks.collectives.broadcast(parameter.data, src=owner)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._sums.clear()
        for parameter in self.parameters:
            parameter.grad = None
        if self.inner is not None:
            self.inner.zero_grad()

    def state_dict(self) -> State:
        """On the first rank the state of all parameters, in the host's memory; on the others that of their share.

        Tensor by tensor, so that the first rank's device and host never hold a share twice.
        """
        state = self.inner.state_dict() if self.inner is not None else {}
        outline = pytree.tree_map_only(Tensor, lambda x: TensorOutline(tuple(x.shape), x.dtype, x.device.type), state)
        outlines = self.ranks.all_gather_object("optimizer", outline)
        if not self.ranks.first:
            pytree.tree_map_only(Tensor, lambda x: self.ranks.collectives.send(x.contiguous(), dst=0), state)
            return state
        parts = [on_host(state)]
        for rank in range(1, self.ranks.size):
            parts.append(pytree.tree_map_only(TensorOutline, lambda x, rank=rank: self._recv(x, rank), outlines[rank]))
        return merge_states(parts, self.owners)

    def load_state_dict(self, state: State) -> None:
        """Take this rank's share of a state that any number of ranks has saved."""
        if self.inner is not None:
            self.inner.load_state_dict(part_of_state(state, self.places))

    def _recv(self, outline: TensorOutline, rank: int) -> Tensor:
        tensor = torch.empty(outline.shape, dtype=outline.dtype, device=outline.device)
        self.ranks.collectives.recv(tensor, src=rank)
        return tensor.to("cpu")


@dataclass(frozen=True)
class TensorOutline:
    """What another rank must know of a tensor to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def part_of_state(state: State, places: Sequence[int]) -> State:
    """What of a whole state belongs to the parameters at these places, counted from the first of them."""
    return {kind: {i: of[p] for i, p in enumerate(places) if p in of} for kind, of in state.items()}


def merge_states(parts: Sequence[State], owners: Sequence[int]) -> State:
    """The state of all parameters, from that of each rank; one without parameters has an empty one."""
    whole: dict[str, dict[int, Any]] = {}
    for rank, state in enumerate(parts):
        places = [i for i, owner in enumerate(owners) if owner == rank]
        for kind, of in state.items():
            whole.setdefault(kind, {}).update({places[i]: value for i, value in of.items()})
    return {kind: dict(sorted(of.items())) for kind, of in whole.items()}
