"""A lean, differentiable forward of the Llama family over flat tokens: what the learner's time and memory are.

The layers are those the engine knows (engine/blocks.py); other families go through transformers. Per token and layer
are kept, in the model's dtype, with h = hidden, a = heads × dim, kv = key heads × dim, m = the MLP's width, r = the sum
of the adapters' ranks:

    h (the residual before each half, twice) · 2 + a (queries) + 2 kv (keys, values) + a (attention's result) + 2 m
    + r; where heads have norms (Qwen3) a + 2 kv more; what `attend` keeps beside its arguments and its result
    (8B: 94 KB, 3.0 MB a token over 32 layers; 1.1B: 40 KB, 0.88 MB over 22; 135M: 11.5 KB, 0.35 MB over 30)

of a layer that is computed again only h. At its highest the backward has 3 m + 3 h a token beside that, for one layer at
a time, and what that layer keeps if it is computed again. The products of a layer with P weights take 2 P FLOPs a token
forward, 2 P for the gradient of their input and 2 P for that of the weights if they are trained; computed again, 2 P less
the way down (2 h m).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from upshot.engine.blocks import Layer, embedded
from upshot.engine.driver import causal_lm, shape_of
from upshot.engine.joined import linear
from upshot.train.halves import GateProduct, NormProduct, Projected, Turned
from upshot.train.products import Product, join, product_of

Attend = Callable[[int, Tensor, Tensor, Tensor, float, int], Tensor]
"""(layer, q [N, H, D], k [N, KV, D], v [N, KV, D], scale, window) → [N, H, D], differentiable."""
Stream = tuple[Tensor, Tensor | None]
"""The residual and what is to be added to it."""


class LeanForward:
    """What the head is applied to, of a model of a family in `is_block_family`."""

    def __init__(self, module: Any, checkpoint: Literal["none", "block"] | int = "none") -> None:
        """`checkpoint`: which blocks are computed again in the backward: none, each, or every k-th."""
        lm = causal_lm(module)
        self.core = lm.model
        self.shape = shape_of(module)
        self.layers = [Layer(layer) for layer in self.core.layers]
        for layer in self.layers:
            join(layer.qkv.modules)
            join(layer.gate_up.modules)
        self.every = {"none": 0, "block": 1}[checkpoint] if isinstance(checkpoint, str) else checkpoint

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[tokens, hidden], after the last norm, of flat tokens (positions begin again with each sequence)."""
        h: Tensor = embedded(self.core.embed_tokens, ids)
        delta: Tensor | None = None
        turns = self._turns(h, positions)
        for index, layer in enumerate(self.layers):
            block = Block(index, layer, self.shape.heads, self.shape.kv_heads, turns, attend)
            if self.every and index % self.every == 0 and torch.is_grad_enabled():
                h = h if delta is None else h + delta
                h, delta = recomputed(block, h, None, use_reentrant=False, preserve_rng_state=block.random)
            else:
                h, delta = block(h, delta)
        last = self.core.norm
        return NormProduct.apply(h, delta, last.weight, last.variance_epsilon, None)[0]

    def _turns(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each token, [tokens, dim / 2]."""
        with torch.no_grad():
            cos, sin = self.core.rotary_emb(h, positions[None])
        half = self.shape.head_dim // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


class Block:
    """One layer in one forward: its products as they are now, so that computing it again gives the same."""

    def __init__(
        self, index: int, layer: Layer, heads: int, kv_heads: int, turns: tuple[Tensor, Tensor], attend: Attend
    ) -> None:
        self.index, self.layer, self.heads, self.kv_heads, self.attend = index, layer, heads, kv_heads, attend
        cos, sin = turns
        self.turns = turns if layer.turns else (torch.ones_like(cos), torch.zeros_like(sin))
        self.qkv, self.o = product_of(layer.qkv.modules), product_of([layer.o])
        self.gate_up, self.down = product_of(layer.gate_up.modules), product_of([layer.down])
        self.random = any(p is None for p in (self.qkv, self.o, self.gate_up, self.down))
        """Whether modules are called that may draw numbers (dropout)."""
        self.calls = 0

    def __call__(self, h: Tensor, delta: Tensor | None) -> Stream:
        """The residual after attention, and what the MLP adds to it."""
        layer = self.layer
        qkv, h = normed_product(layer.norm1, h, delta, self.qkv, layer.qkv.modules)
        q, k, v = self._turned(qkv)
        out = self.attend(self.index, q, k, v, layer.scale, layer.window).reshape(len(h), -1)
        delta = linear(layer.o, out) if self.o is None else Projected.apply(out, self.o, *self.o.parameters)
        gate_up, h = normed_product(layer.norm2, h, delta, self.gate_up, layer.gate_up.modules)
        self.calls += 1
        return h, self._down(gate_up, hollow=self.calls > 1)

    def _turned(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        eps = q_weight = k_weight = None
        if self.layer.head_norms:
            q_norm, k_norm = self.layer.head_norms
            eps, q_weight, k_weight = q_norm.variance_epsilon, q_norm.weight, k_norm.weight
        return Turned.apply(qkv, *self.turns, self.heads, self.kv_heads, eps, q_weight, k_weight)

    def _down(self, gate_up: Tensor, hollow: bool) -> Tensor:
        if self.down is None:
            return linear(self.layer.down, GateProduct.apply(gate_up, False, None))
        return GateProduct.apply(gate_up, hollow, self.down, *self.down.parameters)


def normed_product(
    norm: Any, h: Tensor, delta: Tensor | None, product: Product | None, modules: list[Any]
) -> tuple[Tensor, Tensor]:
    """The projections of norm(h + delta), side by side, and h + delta."""
    if product is not None:
        return NormProduct.apply(h, delta, norm.weight, norm.variance_epsilon, product, *product.parameters)
    x, h = NormProduct.apply(h, delta, norm.weight, norm.variance_epsilon, None)
    return torch.cat([linear(module, x) for module in modules], -1), h
