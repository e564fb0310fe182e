"""A lean, differentiable forward of the families of one block over flat tokens: what the learner's time and memory are.

The layers are those the engine knows (engine/llama/block.py); other families go through transformers. All layers are
one step of autograd's: a small model would else wait for Python between its kernels. Between the matrix products of a
block stand a norm, the rotation of queries and keys, and a gate. What is cheap to compute is computed again in the
backward pass instead of kept; the kernels write it over the gradient they get (engine/kernels).

Per token and layer are kept, in the model's dtype, with h = hidden, a = heads × dim, kv = key heads × dim, m = the
MLP's width, r = the sum of the adapters' ranks:

    h (the residual before each half, twice) · 2 + a (queries) + 2 kv (keys, values) + a (attention's result) + 2 m
    + r; where heads have norms (Qwen3) a + kv more, where halves have norms of their own (Gemma) 2 h; what `attend`
    keeps beside its arguments and its result
    (8B: 94 KB, 3.0 MB a token over 32 layers; 1.1B: 40 KB, 0.88 MB over 22; 135M: 11.5 KB, 0.35 MB over 30)

of a recomputed layer only h; of one whose gate and up projections are recomputed (`mlp`), all but 2 m (8B: 37 KB,
1.2 MB a token), for 2 h · 2 m FLOPs more. At its highest the backward has m + 3 h a token beside that, for one layer at
a time (gate and up become their own gradients), and what that layer keeps if it is recomputed. The products of a layer
with P weights take 2 P FLOPs a token forward, 2 P for the gradient of their input and 2 P for that of the weights if
they are trained; recomputed, 2 P less the down projection (2 h m).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable

from upshot.engine.kernels.plain import Rotation
from upshot.engine.llama.agreement import SkippedBlock
from upshot.engine.llama.block import BlockOptions, Layer, options_of
from upshot.engine.llama.driver import no_rotation, rotation_at
from upshot.engine.llama.linear import embed
from upshot.engine.llama.shape import causal_lm, shape_of
from upshot.training.learner.forward.attention import Attend
from upshot.training.learner.forward.lora_linear import CalledProjections, Gradients, Product, join, products_of
from upshot.training.learner.forward.packed import kernels_for

Checkpointing = Literal["none", "mlp", "block"]


class LeanForward:
    """What the head is applied to, of a model that `has_derivative`."""

    def __init__(self, module: Any, checkpoint: Checkpointing = "none", layers: int | None = None) -> None:
        """`checkpoint`: what the backward recomputes: nothing, gate and up projections of MLPs, or blocks; of the first
        `layers` layers (None: of all). The last ones are those that the backward, when memory is fullest, begins with.
        """
        self.core = causal_lm(module).model
        self.shape, self.options = shape_of(module), options_of(causal_lm(module))
        blocks = [block for block in self.core.layers if not isinstance(block, SkippedBlock)]
        self.layers = [Layer(block, self.options) for block in blocks]
        for layer in self.layers:
            join(layer.qkv.modules)
            join(layer.gate_up.modules)
        self.checkpoint, self.again = checkpoint, len(blocks) if layers is None else layers
        self.groups = [(layer.qkv.modules, [layer.o], layer.gate_up.modules, [layer.down]) for layer in self.layers]
        self._blocks: list[Block | None] = [None] * len(self.layers)
        """As they were in the last forward."""

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[tokens, hidden], after the last norm, of flat tokens (positions begin again with each sequence)."""
        h: Tensor = embed(self.core.embed_tokens, ids)
        if self.options.embed_factor != 1.0:
            h = h * self.options.embed_factor
        blocks = []
        with torch.no_grad():
            for index, (layer, groups, last) in enumerate(zip(self.layers, self.groups, self._blocks, strict=True)):
                products = tuple(map(products_of, groups, last.products if last is not None else (None,) * len(groups)))
                # Kept while projections and trained norms stay the same: new ones cost a small model most of a step.
                if last is None or last.products != products or last.needs != [w.requires_grad for w in last.weights]:
                    last = Block(index, layer, products, self.options)
                blocks.append(last)
            self._blocks = list(blocks)
            by_kind: dict[tuple[str, bool], Rotation] = {}
            for layer in self.layers:
                if (layer.rotation, layer.rotates) not in by_kind:
                    rotation = rotation_at(self.core, h, positions, layer.rotation)
                    by_kind[layer.rotation, layer.rotates] = rotation if layer.rotates else no_rotation(rotation)
            rotations = [by_kind[layer.rotation, layer.rotates] for layer in self.layers]
        batch = BlockInputs(rotations, self.shape.heads, self.shape.kv_heads, attend, kernels_for(h))
        trained = [p for block in blocks for p in block.trained]
        if self.core.norm.weight.requires_grad:
            trained.append(self.core.norm.weight)
        keep = torch.is_grad_enabled() and (h.requires_grad or bool(trained))
        return AllBlocks.apply(self, blocks, batch, keep, h, *trained)


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
        self.attention = layer.attention
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


@dataclass(slots=True)
class RecomputedBlock:
    """A block to compute again: the residual before it, and the random states if it draws numbers."""

    h: Tensor
    states: tuple[Tensor, list[Tensor]] | None


class AllBlocks(torch.autograd.Function):
    """All blocks and the last norm as one step of autograd's, with a backward of their own."""

    @staticmethod
    def forward(
        ctx: Any,
        lean: LeanForward,
        blocks: Sequence[Block],
        batch: BlockInputs,
        keep: bool,
        h: Tensor,
        *trained: Tensor,
    ) -> Tensor:
        """What the head is applied to; `keep`: with what the backward needs."""
        activations: list[SavedActivations | RecomputedBlock | None] = []
        delta: Tensor | None = None
        trains = h.requires_grad  # until something is trained, nothing is kept
        for number, block in enumerate(blocks):
            trains = trains or bool(block.trained)
            again = lean.checkpoint if number < lean.again else "none"
            saved: SavedActivations | RecomputedBlock | None = None
            if keep and trains and again == "block":
                h = h if delta is None else h + delta
                saved = RecomputedBlock(h, random_states(h) if block.random else None)
                h, delta, _ = block.forward(batch, h, None, False)
            else:
                h, delta, saved = block.forward(batch, h, delta, keep and trains, thin=again == "mlp")
            activations.append(saved)
        norm, options = lean.core.norm.weight, lean.options
        x, summed = batch.kernels.add_norm(h, delta, norm, options.eps, options.form)
        if keep:
            ctx.lean, ctx.blocks, ctx.batch, ctx.activations = lean, blocks, batch, activations
            ctx.trained, ctx.summed = [id(p) for p in trained], summed
        return x  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the embedded tokens and of the trained parameters. Activations are freed on the way."""
        if ctx.summed is None:
            raise RuntimeError("the backward of a lean forward was run twice; what it needs is gone after the first")
        norm, options, batch = ctx.lean.core.norm.weight, ctx.lean.options, ctx.batch
        wants_input, gradients = ctx.needs_input_grad[4], dict[int, Tensor]()
        d, of_weight = batch.kernels.norm_backward(
            dy.contiguous(), ctx.summed, norm, options.eps, None, norm.requires_grad, False, options.form
        )
        ctx.summed = None
        if of_weight is not None:
            gradients[id(norm)] = of_weight
        for block in reversed(ctx.blocks):
            saved = ctx.activations.pop()
            if saved is None:
                break
            if isinstance(saved, RecomputedBlock):
                with same_draws(saved):
                    _, _, saved = block.forward(batch, saved.h, None, True, hollow=True)
            further = wants_input or (bool(ctx.activations) and ctx.activations[-1] is not None)
            d, of_block = block.backward(batch, saved, d, further)
            for parameter, gradient in of_block:
                before = gradients.get(id(parameter))
                gradients[id(parameter)] = gradient if before is None else before + gradient
        return None, None, None, None, d if wants_input else None, *map(gradients.get, ctx.trained)


def random_states(h: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The states of the random streams that a block may draw from."""
    return torch.get_rng_state(), [torch.cuda.get_rng_state(h.device)] if h.is_cuda else []


@contextmanager
def same_draws(kept: RecomputedBlock) -> Iterator[None]:
    """Inside, a block draws the same random numbers as when it was first computed."""
    if kept.states is None:
        yield
        return
    with torch.random.fork_rng([kept.h.device] if kept.h.is_cuda else []):
        torch.set_rng_state(kept.states[0])
        for state in kept.states[1]:
            torch.cuda.set_rng_state(state, kept.h.device)
        yield
