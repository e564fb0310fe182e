"""A lean, differentiable forward of the families of one block over flat tokens: what the learner's time and memory are.

The layers are those the engine knows (engine/llama/block.py); other families go through transformers. All layers are
one step of autograd's: a small model would else wait for Python between its kernels. Per token and layer are kept, in
the model's dtype, with h = hidden, a = heads × dim, kv = key heads × dim, m = the MLP's width, r = the sum of the
adapters' ranks:

    h (the residual before each half, twice) · 2 + a (queries) + 2 kv (keys, values) + a (attention's result) + 2 m
    + r; where heads have norms (Qwen3) a + kv more, where halves have norms of their own (Gemma) 2 h; what `attend`
    keeps beside its arguments and its result
    (8B: 94 KB, 3.0 MB a token over 32 layers; 1.1B: 40 KB, 0.88 MB over 22; 135M: 11.5 KB, 0.35 MB over 30)

of a layer that is computed again only h; of one whose way up is (`mlp`), all but 2 m (8B: 37 KB, 1.2 MB a token), for
2 h · 2 m FLOPs more. At its highest the backward has m + 3 h a token beside that, for one layer at a time (the way up
becomes its own gradient), and what that layer keeps if it is computed again. The products of a layer with P weights
take 2 P FLOPs a token forward, 2 P for the gradient of their input and 2 P for that of the weights if they are trained;
computed again, 2 P less the way down (2 h m).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from upshot.engine.kernels.plain import Rotation
from upshot.engine.llama.agreement import SkippedBlock
from upshot.engine.llama.block import Layer, options_of
from upshot.engine.llama.driver import no_rotation, rotation_at
from upshot.engine.llama.linear import embed
from upshot.engine.llama.shape import causal_lm, shape_of
from upshot.training.learner.forward.attention import Attend
from upshot.training.learner.forward.block import Block, BlockInputs, SavedActivations
from upshot.training.learner.forward.logprobs import kernels_for
from upshot.training.learner.forward.lora_linear import join, products_of

Checkpointing = Literal["none", "mlp", "block"]


class LeanForward:
    """What the head is applied to, of a model that `has_derivative`."""

    def __init__(self, module: Any, checkpoint: Checkpointing = "none", layers: int | None = None) -> None:
        """`checkpoint`: what is computed again in the backward: nothing, the way up of MLPs, or blocks; of the first
        `layers` layers (None: of all). The last ones are those that the backward, when memory is fullest, begins with.
        """
        self.core = causal_lm(module).model
        self.shape, self.options = shape_of(module), options_of(causal_lm(module))
        blocks = [block for block in self.core.layers if not isinstance(block, SkippedBlock)]
        self.layers = [Layer(block, form=self.options.form) for block in blocks]
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
                if last is None or not last.holds(products):  # a small model's step would be spent on new blocks
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
