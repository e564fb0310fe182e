"""The Llama block on a GPU: the model's own weights (projections joined), few kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from upshot.engine.attention import Step
from upshot.engine.blocks import sliding_window
from upshot.engine.driver import Shape, causal_lm
from upshot.engine.joined import Joined
from upshot.engine.kernels.decode import processors


class FusedLayer:
    """One block."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = Joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = Joined([mlp.gate_proj, mlp.up_proj])
        self.o, self.down = attention.o_proj, mlp.down_proj
        self.norm1, self.norm2 = layer.input_layernorm, layer.post_attention_layernorm
        self.scale = float(attention.scaling)
        self.window = sliding_window(attention)
        q_norm = getattr(attention, "q_norm", None)
        self.norms = (
            None if q_norm is None else (q_norm.weight, attention.k_norm.weight, float(q_norm.variance_epsilon))
        )


def gated(x: torch.Tensor, joined: Joined) -> torch.Tensor:
    """The MLP's way up, gated."""
    from upshot.engine.kernels.block import gate
    from upshot.engine.kernels.gated import gated_product, gated_tile

    tile = gated_tile(x, joined.weight) if joined.bias is None else None
    if tile is not None:
        return gated_product(x, joined.weight, tile)
    return gate(F.linear(x, joined.weight, joined.bias))


def down_product(x: torch.Tensor, module: Any) -> torch.Tensor:
    """The MLP's way down; for few rows as float32 parts of its long sum [parts, rows, n], which `add_norm` adds up.

    One product of few rows and columns leaves most of the GPU idle: four at once are a quarter faster.
    """
    (rows, inner), n = x.shape, module.weight.shape[0]
    tiles = -(-rows // 128) * -(-n // 128)
    parts = 4 if 4 * tiles <= processors(x.device) else 2 if 2 * tiles <= processors(x.device) else 1
    plain = not x.is_cuda or x.dtype == torch.float32 or module.bias is not None
    if plain or parts == 1 or rows > 512 or inner <= n or inner % (8 * parts):
        return F.linear(x, module.weight, module.bias)
    left = x.view(rows, parts, inner // parts).transpose(0, 1)
    right = module.weight.view(n, parts, inner // parts).permute(1, 2, 0)
    return torch.bmm(left, right, out_dtype=torch.float32)


class FusedDriver:
    """Drives the block with the kernels of kernels/block.py between matrix products."""

    def __init__(self, model: torch.nn.Module, shape: Shape) -> None:
        self.shape = shape
        self.lm = causal_lm(model)
        self.core = self.lm.model
        self.layers = [FusedLayer(layer) for layer in self.core.layers]
        self.cos, self.sin = self._rotary()

    def _rotary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of all positions, [positions, dim / 2], as the model computes them."""
        positions = torch.arange(self.shape.max_length + 1, device=self.shape.device)[None]
        like = torch.empty(1, dtype=self.shape.dtype, device=self.shape.device)
        with torch.no_grad():
            cos, sin = self.core.rotary_emb(like, positions)
        half = self.shape.head_dim // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def refresh(self) -> None:
        """The weights changed: make sure the joined tensors are still the parameters' own."""
        with torch.no_grad():
            for layer in self.layers:
                layer.qkv.refresh()
                layer.gate_up.refresh()

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step, last: torch.Tensor | None) -> torch.Tensor:
        """Logits of the tokens at the indices `last` (None: all)."""
        from upshot.engine.kernels.block import add_norm

        h = F.embedding(ids, self.core.embed_tokens.weight)
        first = self.layers[0].norm1
        x, h = add_norm(h, None, first.weight, first.variance_epsilon)
        for index, layer in enumerate(self.layers):
            qkv = F.linear(x, layer.qkv.weight, layer.qkv.bias)
            out = step.rotate_attend(index, qkv, self.cos, self.sin, layer.scale, layer.window, layer.norms)  # type: ignore[attr-defined]
            out = out.flatten(1)
            final = index + 1 == len(self.layers)
            if final and last is not None:  # of the others nobody needs more than their keys and values
                out, h = out[last], h[last]
            y = F.linear(out, layer.o.weight, layer.o.bias)
            x, h = add_norm(y, h, layer.norm2.weight, layer.norm2.variance_epsilon)
            y = gated(x, layer.gate_up)
            after = self.core.norm if final else self.layers[index + 1].norm1
            x, h = add_norm(down_product(y, layer.down), h, after.weight, after.variance_epsilon)
        return F.linear(x, self.lm.lm_head.weight)
