"""A lean forward for the Llama family: the model's own modules, called one by one.

transformers' forward spends more time in Python than in arithmetic when the model or the batch is small. The layers of
Llama, Mistral, Qwen2 and Qwen3 (and what is built from their classes: SmolLM2, TinyLlama …) are the same
block; this calls its modules directly, adapters included. Families with other blocks go through `ModuleDriver`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from upshot.engine.attention import Step
from upshot.engine.driver import ModuleDriver, Shape, causal_lm
from upshot.engine.joined import Joined

FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


def is_block_family(model: torch.nn.Module) -> bool:
    """Whether the model is built from the block this file knows."""
    lm = causal_lm(model)
    config = getattr(lm, "config", None)
    return type(lm).__name__ in FAMILY and getattr(config, "hidden_act", "") == "silu"


def can_join(model: torch.nn.Module) -> bool:
    """Whether the block is known and all its projections are plain (no adapters)."""
    if not is_block_family(model):
        return False
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for layer in causal_lm(model).model.layers:
        parts = [getattr(layer.self_attn, n, None) or getattr(layer.mlp, n, None) for n in names]
        if any(type(part) is not torch.nn.Linear for part in parts):
            return False
    return True


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, dim]; cos, sin [tokens, 1, dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Layer:
    """The modules of one block, looked up once."""

    __slots__ = (
        *("down", "gate", "gate_up", "k", "k_norm", "norm1", "norm2", "o"),
        *("q", "q_norm", "qkv", "scale", "up", "v", "window"),
    )

    def __init__(self, layer: Any, join: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.q, self.k, self.v, self.o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.gate, self.up, self.down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.norm1, self.norm2 = layer.input_layernorm, layer.post_attention_layernorm
        self.scale = float(attention.scaling)
        self.window = sliding_window(attention)
        self.qkv = Joined([self.q, self.k, self.v]) if join and self.q_norm is None else None
        self.gate_up = Joined([self.gate, self.up]) if join else None


def sliding_window(attention: Any) -> int:
    """How far back the layer looks; 0 is all the way."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or 0
    # Mistral reads it from the config at every call.
    return getattr(attention.config, "sliding_window", None) or 0 if "Mistral" in type(attention).__name__ else 0


def linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A plain projection without the module call's overhead; anything else (an adapter) is called."""
    if type(module) is torch.nn.Linear:
        return F.linear(x, module.weight, module.bias)
    return module(x)


def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """RMS norm as the family computes it (float32 inside)."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)
    return module(x)


class BlockDriver:
    """Calls the model's layers one by one."""

    def __init__(self, model: torch.nn.Module, shape: Shape) -> None:
        self.shape = shape
        inner = ModuleDriver(model, shape)
        self.lm, self.quiet = inner.lm, inner.quiet
        self.core = self.lm.model
        join = can_join(model)
        self.layers = [Layer(layer, join) for layer in self.core.layers]

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step, last: torch.Tensor | None) -> torch.Tensor:
        """Logits of the tokens at the indices `last` (None: all)."""
        loud = [m for m in self.quiet if m.training]
        for module in loud:
            module.training = False
        try:
            return self._forward(ids, positions, step, last)
        finally:
            for module in loud:
                module.training = True

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, step: Step, last: torch.Tensor | None
    ) -> torch.Tensor:
        h = F.embedding(ids, self.core.embed_tokens.weight)
        cos, sin = (x[0][:, None] for x in self.core.rotary_emb(h, positions[None]))
        n = len(ids)
        for index, layer in enumerate(self.layers):
            x = norm(layer.norm1, h)
            q, k, v = self._projected(layer, x, cos, sin)
            out = step.attend(index, q, k, v, layer.scale, layer.window).reshape(n, -1)
            if last is not None and index + 1 == len(self.layers):
                out, h = out[last], h[last]  # of the others nobody needs more than their keys and values
            h = h + linear(layer.o, out)
            x = norm(layer.norm2, h)
            if layer.gate_up is not None:
                gate, up = F.linear(x, layer.gate_up.weight, layer.gate_up.bias).chunk(2, -1)
            else:
                gate, up = linear(layer.gate, x), linear(layer.up, x)
            h = h + linear(layer.down, F.silu(gate).mul_(up))
        return linear(self.lm.lm_head, norm(self.core.norm, h))

    def _projected(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values, [tokens, heads, dim] each."""
        shape, n = self.shape, len(x)
        both = shape.heads + shape.kv_heads
        if layer.qkv is not None and layer.q_norm is None:
            qkv = F.linear(x, layer.qkv.weight, layer.qkv.bias).view(n, both + shape.kv_heads, shape.head_dim)
            turned = rotate(qkv[:, :both], cos, sin)
            return turned[:, : shape.heads], turned[:, shape.heads :], qkv[:, both:]
        q = linear(layer.q, x).view(n, shape.heads, shape.head_dim)
        k = linear(layer.k, x).view(n, shape.kv_heads, shape.head_dim)
        v = linear(layer.v, x).view(n, shape.kv_heads, shape.head_dim)
        if layer.q_norm is not None:
            q, k = norm(layer.q_norm, q), norm(layer.k_norm, k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def refresh(self) -> None:
        """The weights changed: make sure the joined tensors are still the parameters' own."""
        with torch.no_grad():
            for layer in self.layers:
                for joined in (layer.qkv, layer.gate_up):
                    if joined is not None:
                        joined.refresh()
