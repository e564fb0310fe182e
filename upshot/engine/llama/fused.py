"""The Llama block on a GPU: the model's own weights (projections joined), few kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from upshot.engine.kernels.decode import processors
from upshot.engine.llama.attention import AttentionStep
from upshot.engine.llama.blocks import BlockDriver, Layer, embedded
from upshot.engine.llama.driver import Shape
from upshot.engine.llama.joined import Projections, linear
from upshot.engine.llama.merged import Merging


def gated(x: torch.Tensor, way_up: Projections) -> torch.Tensor:
    """The MLP's way up, gated."""
    from upshot.engine.kernels.block import gate
    from upshot.engine.kernels.gated import gated_product, gated_tile

    joined = way_up.joined
    if joined is not None and joined.bias is None:
        tile = gated_tile(x, joined.weight)
        if tile is not None:
            return gated_product(x, joined.weight, tile)
    return gate(way_up(x))


def down_product(x: torch.Tensor, module: Any) -> torch.Tensor:
    """The MLP's way down; for few rows as float32 parts of its long sum [parts, rows, n], which `add_norm` adds up.

    One product of few rows and columns leaves most of the GPU idle: four at once are a quarter faster.
    """
    if type(module) is not torch.nn.Linear or module.bias is not None or not x.is_cuda or x.dtype == torch.float32:
        return linear(module, x)
    (rows, inner), n = x.shape, module.weight.shape[0]
    tiles = -(-rows // 128) * -(-n // 128)
    parts = 4 if 4 * tiles <= processors(x.device) else 2 if 2 * tiles <= processors(x.device) else 1
    if parts == 1 or rows > 512 or inner <= n or inner % (8 * parts):
        return F.linear(x, module.weight)
    left = x.view(rows, parts, inner // parts).transpose(0, 1)
    right = module.weight.view(n, parts, inner // parts).permute(1, 2, 0)
    return torch.bmm(left, right, out_dtype=torch.float32)


def head_norms(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """The weights of the norms of queries and keys and what they add to the variance, if the family has them."""
    if not layer.head_norms:
        return None
    q_norm, k_norm = layer.head_norms
    return q_norm.weight, k_norm.weight, float(q_norm.variance_epsilon)


class FusedDriver(BlockDriver):
    """Drives the block with the kernels of kernels/block.py between matrix products."""

    def __init__(self, model: torch.nn.Module, shape: Shape, merge: Merging = "copy") -> None:
        super().__init__(model, shape, merge)
        self.cos, self.sin = self._rotary()
        self._still = torch.ones_like(self.cos), torch.zeros_like(self.sin)

    def _rotary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of all positions, [positions, dim / 2], as the model computes them."""
        positions = torch.arange(self.shape.max_length + 1, device=self.shape.device)[None]
        like = torch.empty(1, dtype=self.shape.dtype, device=self.shape.device)
        with torch.no_grad():
            cos, sin = self.core.rotary_emb(like, positions)
        half = self.shape.head_dim // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def _hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, last: torch.Tensor | None
    ) -> torch.Tensor:
        """What the head is applied to."""
        from upshot.engine.kernels.block import add_norm

        h = embedded(self.embed, ids)
        first = self.layers[0].norm1
        x, h = add_norm(h, None, first.weight, first.variance_epsilon)
        for index, layer in enumerate(self.layers):
            cos, sin = (self.cos, self.sin) if layer.turns else self._still
            out = step.rotate_attend(index, layer.qkv(x), cos, sin, layer.scale, layer.window, head_norms(layer))  # type: ignore[attr-defined]
            out = out.flatten(1)
            final = index + 1 == len(self.layers)
            if final and last is not None:  # of the others nobody needs more than their keys and values
                out, h = out[last], h[last]
            x, h = add_norm(linear(layer.o, out), h, layer.norm2.weight, layer.norm2.variance_epsilon)
            y = gated(x, layer.gate_up)
            after = self.core.norm if final else self.layers[index + 1].norm1
            x, h = add_norm(down_product(y, layer.down), h, after.weight, after.variance_epsilon)
        return x
