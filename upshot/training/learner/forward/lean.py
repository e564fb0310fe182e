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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from upshot.engine.kernels import kernels_for
from upshot.engine.llama.agreement import SkippedBlock
from upshot.engine.llama.block import Layer, no_rotation, options_of, rotation_at
from upshot.engine.llama.driver import causal_lm, shape_of
from upshot.engine.llama.linear import embed
from upshot.training.learner.forward.attention import Attend
from upshot.training.learner.forward.block import Block, BlockInputs, SavedActivations
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
        self._last: list[Block | None] = [None] * len(self.layers)

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[tokens, hidden], after the last norm, of flat tokens (positions begin again with each sequence)."""
        h: Tensor = embed(self.core.embed_tokens, ids)
        if self.options.embed_factor != 1.0:
            h = h * self.options.embed_factor
        with torch.no_grad():
            blocks = self._blocks()
            kinds = dict.fromkeys(layer.rotation for layer in self.layers)
            rotations = {kind: rotation_at(self.core, h, positions, kind) for kind in kinds}
            still = None if all(layer.rotates for layer in self.layers) else no_rotation(next(iter(rotations.values())))
            batch = BlockInputs(rotations, still, self.shape.heads, self.shape.kv_heads, attend, kernels_for(h))
            stack = BlockStack(blocks, self.core.norm, batch, self.checkpoint, self.again)
        if not torch.is_grad_enabled():
            return stack.forward(h, False)
        trained = [p for block in blocks for p in block.trained]
        if self.core.norm.weight.requires_grad:
            trained.append(self.core.norm.weight)
        return StackFunction.apply(stack, h, *trained)

    def _blocks(self) -> list[Block]:
        """All layers as they are now; those of the last forward where nothing changed."""
        blocks = []
        for index, (layer, groups, last) in enumerate(zip(self.layers, self.groups, self._last, strict=True)):
            before = last.products if last is not None else (None,) * len(groups)
            products = tuple(products_of(group, old) for group, old in zip(groups, before, strict=True))
            same = last is not None and last.holds(products)
            blocks.append(last if last is not None and same else Block(index, layer, products, self.options))
        self._last = list(blocks)
        return blocks


@dataclass(slots=True)
class RecomputedBlock:
    """A block that is computed again: the sum it begins with, and the random states if it draws numbers."""

    h: Tensor
    states: tuple[Tensor, list[Tensor]] | None


class BlockStack:
    """All blocks and the last norm in one forward and one backward."""

    def __init__(
        self, blocks: list[Block], norm: Any, batch: BlockInputs, checkpoint: Checkpointing, again: int
    ) -> None:
        self.blocks, self.norm, self.batch, self.checkpoint, self.again = blocks, norm, batch, checkpoint, again
        self.how = (blocks[0].eps, blocks[0].form)
        """What all norms add to the variance, and how they meet their weights."""
        self.kept: list[SavedActivations | RecomputedBlock | None] = []
        self.summed: Tensor | None = None

    def forward(self, h: Tensor, keep: bool) -> Tensor:
        """The normed result; `keep`: with what the backward needs."""
        delta: Tensor | None = None
        before = not h.requires_grad  # so long as nothing is trained, nothing is kept
        for number, block in enumerate(self.blocks):
            before = before and not block.trained
            kept: SavedActivations | RecomputedBlock | None = None
            again = self.checkpoint if number < self.again else "none"
            if keep and not before and again == "block":
                h = h if delta is None else h + delta
                kept = RecomputedBlock(h, random_states(h) if block.random else None)
                h, delta, _ = block.forward(self.batch, h, None, False)
            else:
                h, delta, kept = block.forward(self.batch, h, delta, keep and not before, thin=again == "mlp")
            if keep:
                self.kept.append(kept)
        x, summed = self.batch.kernels.add_norm(h, delta, self.norm.weight, *self.how)
        if keep:
            self.summed = summed
        return x

    def backward(self, dy: Tensor, wants_input: bool) -> tuple[Tensor | None, dict[int, Tensor]]:
        """The gradients of the input, and of what is trained by the parameter's id. What is kept is given up."""
        if self.summed is None:
            raise RuntimeError("the backward of a lean forward was run twice; what it needs is gone after the first")
        norm, found = self.norm, dict[int, Tensor]()
        wants = norm.weight.requires_grad
        d, of_weight = self.batch.kernels.norm_backward(
            dy.contiguous(), self.summed, norm.weight, self.how[0], None, wants, False, self.how[1]
        )
        self.summed = None
        if of_weight is not None:
            found[id(norm.weight)] = of_weight
        for block in reversed(self.blocks):
            kept = self.kept.pop()
            if kept is None:
                break
            if isinstance(kept, RecomputedBlock):
                with same_draws(kept):
                    _, _, kept = block.forward(self.batch, kept.h, None, True, hollow=True)
                assert kept is not None
            further = wants_input or (bool(self.kept) and self.kept[-1] is not None)
            d, grads = block.backward(self.batch, kept, d, further)
            for parameter, grad in grads:
                before = found.get(id(parameter))
                found[id(parameter)] = grad if before is None else before + grad
        return d, found


class StackFunction(torch.autograd.Function):
    """A stack as one step of autograd's."""

    @staticmethod
    def forward(ctx: Any, stack: BlockStack, h: Tensor, *trained: Tensor) -> Tensor:
        """What the head is applied to."""
        ctx.stack, ctx.trained = stack, [id(p) for p in trained]
        return stack.forward(h, any(ctx.needs_input_grad))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the embedded tokens and of what is trained."""
        d, found = ctx.stack.backward(dy, ctx.needs_input_grad[1])
        return None, d if ctx.needs_input_grad[1] else None, *[found.get(i) for i in ctx.trained]


def random_states(h: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The states of the random streams a block may draw from."""
    return torch.get_rng_state(), [torch.cuda.get_rng_state(h.device)] if h.is_cuda else []


@contextmanager
def same_draws(kept: RecomputedBlock) -> Iterator[None]:
    """Inside, the numbers are drawn that were drawn when the block was first computed."""
    if kept.states is None:
        yield
        return
    with torch.random.fork_rng([kept.h.device] if kept.h.is_cuda else []):
        torch.set_rng_state(kept.states[0])
        for state in kept.states[1]:
            torch.cuda.set_rng_state(state, kept.h.device)
        yield
