"""One block in one forward: its values, and its derivative written by hand.

Between the matrix products stand a norm, the rotation of queries and keys, and a gate. What is cheap to compute is
computed again in the backward pass instead of kept; the kernels write it over the gradient they get (engine/kernels).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from upshot.engine.kernels.plain import AttentionOptions, Rotation
from upshot.engine.llama.block import BlockOptions, Layer
from upshot.training.learner.forward.attention import Attend
from upshot.training.learner.forward.lora_linear import CalledProjections, Gradients, Product


@dataclass(slots=True)
class SavedActivations:
    """What a block's derivative needs."""

    first: Tensor
    """The residual before attention."""
    raw: Tensor | None
    """Queries, keys and values before the norms of heads; None if heads have none."""
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    """Attention's result, with its graph."""
    second: Tensor
    """The residual before the MLP."""
    gate_up: Tensor | None
    """The MLP's up projection, its largest activation; None: it is computed again from `second`."""
    products: tuple[Any, Any, Any, Any]
    """What each product keeps for its derivative."""
    ends: tuple[Tensor | None, Tensor | None]
    """The results of attention and MLP before their own norms, in families that have such norms."""


@dataclass(slots=True)
class BlockInputs:
    """What all blocks of one forward share."""

    rotations: Sequence[Rotation]
    """Of each layer."""
    heads: int
    kv_heads: int
    attend: Attend
    kernels: Any
    """The functions between the products."""


class Block:
    """A layer of the model, with its projections as they are now."""

    def __init__(
        self, index: int, layer: Layer, products: tuple[Product | CalledProjections, ...], options: BlockOptions
    ) -> None:
        self.index = index
        self.attention = AttentionOptions(layer.scale, layer.window, options.softcap)
        self.options = options
        self.eps, self.form = options.eps, options.form
        self.products = products
        self.qkv, self.o, self.gate_up, self.down = products
        self.norm1, self.norm2 = (norm.weight for norm in (layer.norm1, layer.norm2))
        self.after1, self.after2 = (norm and norm.weight for norm in (layer.after1, layer.after2))
        self.norms = layer.head_norms
        ends = [weight for weight in (self.after1, self.after2) if weight is not None]
        self.weights = [self.norm1, self.norm2, *ends, *(self.norms or ())[:2]]
        """The weights of all norms."""
        self.needs = [weight.requires_grad for weight in self.weights]
        self.trained = [w for w in self.weights if w.requires_grad] + [p for each in products for p in each.trained]

    def holds(self, products: tuple[Product | CalledProjections, ...]) -> bool:
        """Whether projections and trained norms are still those that the block was made of."""
        return products == self.products and self.needs == [weight.requires_grad for weight in self.weights]

    @property
    def random(self) -> bool:
        """Whether it calls modules that may draw random numbers (dropout)."""
        return self.qkv.random or self.o.random or self.gate_up.random or self.down.random

    def forward(
        self, batch: BlockInputs, h: Tensor, delta: Tensor | None, keep: bool, hollow: bool = False, thin: bool = False
    ) -> tuple[Tensor, Tensor, SavedActivations | None]:
        """The residual, what is to be added to it, and with `keep` what the derivative needs.

        `hollow`: only the last of these is wanted, so the last product is not computed. `thin`: the up projection is
        not kept, unless it draws random numbers.
        """
        kernels = batch.kernels
        x, first = kernels.add_norm(h, delta, self.norm1, self.eps, self.form)
        qkv, of_qkv = self.qkv.outputs(x, keep)
        # Without head norms this rotates in place, over `qkv`; the derivative does not need the old values.
        q, k, v = kernels.rotate_heads(qkv, batch.rotations[self.index], batch.heads, batch.kv_heads, self.norms)
        if keep:
            q, k, v = q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
        with torch.set_grad_enabled(keep):
            out = batch.attend(self.index, q, k, v, self.attention)
        delta, of_o = self.o.outputs(out.detach().reshape(x.shape[0], -1), keep)
        delta, end1 = self._end(batch, delta, self.after1)
        x, second = kernels.add_norm(first, delta, self.norm2, self.eps, self.form)
        gate_up, of_gate_up = self.gate_up.outputs(x, keep)
        x = kernels.gate(gate_up, self.options.act)
        # A norm behind the last product needs that product for its derivative.
        hollow = hollow and self.after2 is None
        delta, of_down = self.down.without_result(x) if hollow else self.down.outputs(x, keep)
        delta, end2 = self._end(batch, delta, None if hollow else self.after2)
        if not keep:
            return second, delta, None
        raw = None if self.norms is None else qkv
        kept = (of_qkv, of_o, of_gate_up, of_down)
        way_up = None if thin and not self.gate_up.random else gate_up
        return second, delta, SavedActivations(first, raw, q, k, v, out, second, way_up, kept, (end1, end2))

    def _end(self, batch: BlockInputs, y: Tensor, after: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What attention or MLP adds to the residual, after its own norm and factor; and the same before the norm."""
        before = None
        if after is not None:
            before, y = y, batch.kernels.add_norm(y, None, after, self.eps, self.form)[0]
        return y if self.options.factor == 1.0 else y * self.options.factor, before

    def _end_backward(
        self, batch: BlockInputs, d: Tensor, after: Tensor | None, before: Tensor | None, grads: Gradients
    ) -> Tensor:
        if self.options.factor != 1.0:
            d = d * self.options.factor
        if after is None:
            return d
        d, of_weight = batch.kernels.norm_backward(
            d, before, after, self.eps, None, after.requires_grad, False, self.form
        )
        if of_weight is not None:
            grads.append((after, of_weight))
        return d

    def backward(
        self, batch: BlockInputs, kept: SavedActivations, d: Tensor, further: bool
    ) -> tuple[Tensor | None, Gradients]:
        """From the gradient of the residual after the block: that of the residual before it (None unless it is needed
        `further` down), and those of the trained parameters."""
        kernels = batch.kernels
        of_qkv, of_o, of_gate_up, of_down = kept.products
        grads: Gradients = []
        end = self._end_backward(batch, d, self.after2, kept.ends[1], grads)
        x, more = self.down.input_gradient(end, of_down)
        # The gradient of the up projection is written over the projection itself. If the gradient of `down` needs the
        # gated values, the kernel writes them over their own gradient `x`: hence this order.
        dx = kernels.gate_backward(self._way_up(batch, kept), x, self.down.reads, self.options.act)
        grads += self.down.gradients(end, x, of_down, more)
        d = self._norm_backward(batch, self.gate_up, self.norm2, dx, kept.second, d, of_gate_up, grads)
        x = kept.out.detach()
        end = self._end_backward(batch, d, self.after1, kept.ends[0], grads)
        dx, more = self.o.input_gradient(end, of_o)
        grads += self.o.gradients(end, x.reshape(d.shape[0], -1), of_o, more)
        dq, dk, dv = attention_gradients(kept, dx.view(x.shape))
        wants = self.norms is not None and any(self.needs[-2:])
        dx, of_q, of_k = kernels.rotate_heads_backward(
            dq, dk, dv, batch.rotations[self.index], kept.raw, self.norms, wants
        )
        if wants and self.norms is not None:
            grads += [(self.norms[0], of_q), (self.norms[1], of_k)]
        if further or self.norm1.requires_grad or isinstance(self.qkv, CalledProjections):
            return self._norm_backward(batch, self.qkv, self.norm1, dx, kept.first, d, of_qkv, grads), grads
        # Nothing before this block is trained: the large product for the gradient of its input is not computed.
        x, _ = kernels.add_norm(kept.first, None, self.norm1, self.eps, self.form)
        grads += self.qkv.gradients(dx, x, of_qkv, self.qkv.thin_gradient(dx))
        return None, grads

    def _way_up(self, batch: BlockInputs, kept: SavedActivations) -> Tensor:
        """The MLP's up projection, kept or computed again; the caller overwrites it."""
        if kept.gate_up is not None:
            # The autograd graph of called projections holds this tensor, too.
            return kept.gate_up.clone() if self.gate_up.random else kept.gate_up
        x, _ = batch.kernels.add_norm(kept.second, None, self.norm2, self.eps, self.form)
        return self.gate_up.outputs(x, False)[0]

    def _norm_backward(
        self,
        batch: BlockInputs,
        product: Product | CalledProjections,
        weight: Tensor,
        dy: Tensor,
        summed: Tensor,
        residual: Tensor,
        kept: Any,
        grads: Gradients,
    ) -> Tensor:
        """The gradient of the sum before norm and product, plus that of the residual; parameters' go to `grads`."""
        x, more = product.input_gradient(dy, kept)
        d, of_weight = batch.kernels.norm_backward(
            x, summed, weight, self.eps, residual, weight.requires_grad, product.reads, self.form
        )
        if of_weight is not None:
            grads.append((weight, of_weight))
        grads += product.gradients(dy, x, kept, more)
        return d


def attention_gradients(kept: SavedActivations, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of queries, keys and values."""
    node, arguments = kept.out.grad_fn, (kept.q, kept.k, kept.v)
    if isinstance(node, BackwardCFunction):
        inputs = [getattr(function, "variable", None) for function, _ in node.next_functions[:3]]
        if len(inputs) == 3 and all(map(operator.is_, inputs, arguments)):
            # `out` comes from one function of q, k and v: calling that is much less work than autograd's engine.
            dq, dk, dv = node.apply(d)[:3]
            return dq, dk, dv
    dq, dk, dv = torch.autograd.grad(kept.out, arguments, d)
    return dq, dk, dv
