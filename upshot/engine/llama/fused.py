"""`FusedDriver`: the decoder block with Triton kernels between its matrix products. select.py prefers it on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from upshot.engine.kernels.gate import gate, gated_product, gated_tile
from upshot.engine.kernels.launch import processors
from upshot.engine.kernels.logprobs import finish_logits
from upshot.engine.kernels.norm import add_norm
from upshot.engine.kernels.plain import SILU
from upshot.engine.llama.attention import AttentionStep
from upshot.engine.llama.block import Layer
from upshot.engine.llama.driver import BlockDriver, no_rotation, rotation_at
from upshot.engine.llama.eight_bit import Projections8
from upshot.engine.llama.linear import Projections, linear
from upshot.engine.llama.shape import Shape


def gate_projections(x: Tensor, gate_up: Projections, act: int = SILU) -> Tensor:
    """act(gate projection) × up projection of x [rows, hidden]; in one kernel if that is faster."""
    joined = gate_up.joined
    if joined is not None and joined.bias is None:
        tile = gated_tile(x, joined.weight)
        if tile is not None:
            return gated_product(x, joined.weight, tile, act)
    return gate(gate_up(x), act)


def project_out(module: Any, x: Any) -> Tensor:
    """The output projection of attention or MLP, [rows, n]; or split-K, as float32 partial sums [parts, rows, n] that
    `add_norm` adds up.

    The MLP's down projection of few rows leaves most of the GPU idle; in four parts it is a quarter faster.
    """
    if isinstance(module, Projections8):
        return module.in_parts(x)
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


class FusedDriver(BlockDriver):
    """`BlockDriver` with Triton kernels for norms, rotation, gate and attention."""

    add_norm = staticmethod(add_norm)
    finish_logits = staticmethod(finish_logits)
    project_out = staticmethod(project_out)

    def __init__(self, model: torch.nn.Module, shape: Shape, *how: Any) -> None:
        super().__init__(model, shape, *how)
        # cos and sin of all positions, which kernels index: a CUDA graph must not depend on the positions of one batch.
        positions = torch.arange(shape.max_length + 1, device=shape.device)
        with torch.no_grad():
            like = torch.empty(1, dtype=shape.dtype, device=shape.device)
            kinds = {layer.rotation for layer in self.layers}
            self.tables = {
                kind: rotation_at(self.core, like, positions, kind, self.options.half_angles) for kind in kinds
            }
        self._still = {kind: no_rotation(table) for kind, table in self.tables.items()}

    def _rotations(self, h: Tensor, positions: Tensor) -> dict[str, Any]:
        return self.tables

    def _attend(self, index: int, layer: Layer, qkv: Tensor, rotation: Any, step: AttentionStep) -> Any:
        cos, sin = rotation if layer.rotates else self._still[layer.rotation]
        out = step.rotate_attend(index, qkv, cos, sin, layer.head_norms, layer.attention)  # type: ignore[attr-defined]
        return out.flatten(1) if isinstance(out, Tensor) else out  # in 8 bits it is flat already

    def _join(self, x: Tensor, h: Tensor | None, after: Any, before: Any, **how: Any) -> tuple[Any, Tensor]:
        if self.narrow and before not in (None, self.core.norm):  # the head is not in 8 bits
            how["narrow"] = True
        return super()._join(x, h, after, before, **how)

    def _mlp(self, layer: Layer, x: Any) -> Tensor:
        act = self.options.act
        gated = gate(layer.gate_up(x), act, narrow=True) if self.narrow else gate_projections(x, layer.gate_up, act)
        return self.project_out(layer.down, gated)
