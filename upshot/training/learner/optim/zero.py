"""An optimizer over several ranks: each keeps masters, moments and gradient sums of its share of the parameters.

The weights are whole in every rank: its engine needs them so. What is too large to have several times, two to eight
times the weights, is there once: every parameter belongs to one rank. After each micro-batch gradients are summed there
in float32, that rank takes the step, and the others get the new weights from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from upshot.training.learner.distributed.ranks import Ranks, assign
from upshot.training.learner.optim.adamw import MasterAdamW
from upshot.training.learner.optim.shards import Leaf, filled, leaves, outline, part, whole
from upshot.training.learner.snapshot import on_host

Parameters = Sequence[torch.nn.Parameter]


class ShardedAdamW:
    """`MasterAdamW`, of which each rank has a share. Its saved state is that of one rank that has all."""

    def __init__(self, parameters: Parameters, ranks: Ranks, make: Callable[[Parameters], MasterAdamW]) -> None:
        self.parameters = list(parameters)
        self.ranks = ranks
        self.owners = assign([p.numel() for p in self.parameters], ranks.size)
        self.places = [i for i, owner in enumerate(self.owners) if owner == ranks.rank]
        """Which parameters are this rank's."""
        self.inner = make([self.parameters[i] for i in self.places]) if self.places else None
        self._sums: dict[int, torch.Tensor] = {}

    @property
    def masters(self) -> list[torch.nn.Parameter]:
        """What this rank updates."""
        return self.inner.masters if self.inner is not None else []

    def gather(self) -> None:
        """Sum what the ranks have found in a micro-batch; ranks that had none call this, too."""
        found = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.float32)
        found = found.to(self.parameters[0].device)
        self.ranks.add_up(found)
        masters = dict(zip(self.places, self.masters, strict=True))
        for i, anywhere in enumerate(found.tolist()):
            if not anywhere:
                continue  # as in one process: without a gradient a weight does not even decay
            parameter, owner = self.parameters[i], self.owners[i]
            grad = parameter.grad.float() if parameter.grad is not None else torch.zeros_like(parameter).float()
            parameter.grad = None
            self.ranks.add_up(grad, owner)
            if i in masters:
                own = grad.to(masters[i].device)
                self._sums[i] = self._sums[i].add_(own) if i in self._sums else own

    def clip(self, most: float) -> float:
        """Scale the gradient of all ranks down to this norm, where it is larger; the norm it had."""
        for i, master in zip(self.places, self.masters, strict=True):
            master.grad = self._sums.pop(i, None)
        grads = [master.grad for master in self.masters if master.grad is not None]
        squared = torch.zeros(1, dtype=torch.float64, device=self.parameters[0].device)
        if grads:
            squared += torch.nn.utils.get_total_norm(grads).to(squared).square()
        self.ranks.add_up(squared)
        norm = math.sqrt(float(squared)) if torch.isfinite(squared).all() else float(squared)
        if grads and math.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self.masters, most, torch.tensor(norm))
        return norm

    def step(self, lr: float) -> None:
        """One update at this learning rate; afterwards all ranks have the new weights."""
        if self.inner is not None:
            self.inner.step(lr)
        for parameter, owner in zip(self.parameters, self.owners, strict=True):
            self.ranks.spread(parameter.data, owner)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._sums.clear()
        for parameter in self.parameters:
            parameter.grad = None
        if self.inner is not None:
            self.inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """On the first rank the state of all parameters, in the host's memory; on the others that of their share."""
        own = self.inner.state_dict() if self.inner is not None else {}
        outlines = self.ranks.exchange_now("optimizer", outline(own))
        parts = [self._part(own, outlines[rank], rank) for rank in range(self.ranks.size)]
        return whole(parts, self.owners, self._matrices()) if self.ranks.first else own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's share of a state that any number of ranks has saved."""
        if self.inner is not None:
            self.inner.load_state_dict(part(state, self.places, self._matrices()))

    def _part(self, own: dict[str, Any], theirs: Any, rank: int) -> dict[str, Any]:
        """A rank's state on the first rank; the others only send theirs."""
        if rank == self.ranks.rank:
            for tensor in leaves(own):
                self.ranks.bring(tensor.contiguous(), rank)
            return dict(on_host(own)) if self.ranks.first else own
        return dict(filled(theirs, lambda leaf: self._brought(leaf, rank))) if self.ranks.first else {}

    def _brought(self, leaf: Leaf, rank: int) -> torch.Tensor:
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        self.ranks.bring(tensor, rank)
        return tensor.to("cpu")

    def _matrices(self) -> list[bool]:
        return [p.ndim >= 2 for p in self.parameters]
