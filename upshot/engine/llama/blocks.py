"""A lean forward for the Llama family: the model's own modules, called one by one.

transformers' forward spends more time in Python than in arithmetic when the model or the batch is small. The layers of
Llama, Mistral, Qwen2, Qwen3 and SmolLM3 (and what is built from their classes: SmolLM2, TinyLlama …) are the same
block; this calls its modules directly. Projections, embedding and head may have adapters, which are merged (merged.py)
or called as modules. Families with other blocks, and adapters on other modules, go through `ModuleDriver`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from upshot.engine.llama.attention import AttentionStep
from upshot.engine.llama.driver import ModuleDriver, Shape, causal_lm
from upshot.engine.llama.joined import linear
from upshot.engine.llama.merged import Merging, Weights, unmerged

FAMILIES = {"Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3"}


def is_block_family(model: torch.nn.Module) -> bool:
    """Whether the model is built from the block this file knows, and nothing wraps what it does not call."""
    lm = causal_lm(model)
    family = type(lm).__name__.removesuffix("ForCausalLM")
    if family not in FAMILIES or getattr(lm.config, "hidden_act", "") != "silu":
        return False
    return all(type(module).__name__ == family + kind for module, kind in _own_parts(lm))


def _own_parts(lm: Any) -> Iterator[tuple[Any, str]]:
    """The modules whose work is done here instead, and what they must be."""
    yield lm.model, "Model"
    yield lm.model.norm, "RMSNorm"
    for layer in lm.model.layers:
        yield layer, "DecoderLayer"
        yield layer.self_attn, "Attention"
        yield layer.mlp, "MLP"
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, *_head_norms(layer.self_attn)):
            yield norm, "RMSNorm"


def _head_norms(attention: Any) -> list[Any]:
    return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []


def embedded(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """A plain embedding without the module call's overhead; anything else (an adapter) is called."""
    return F.embedding(ids, module.weight) if type(module) is torch.nn.Embedding else module(ids)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, dim]; cos, sin [tokens, 1, dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Layer:
    """The modules of one block, looked up once."""

    __slots__ = ("down", "gate_up", "head_norms", "norm1", "norm2", "o", "qkv", "scale", "turns", "window")

    def __init__(self, layer: Any, weights: Weights | None = None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        weights = weights or unmerged()
        self.qkv = weights.together([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = weights.together([mlp.gate_proj, mlp.up_proj])
        self.o, self.down = weights.alone(attention.o_proj), weights.alone(mlp.down_proj)
        self.norm1, self.norm2 = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = _head_norms(attention)
        """Of queries and keys; empty where the family has none."""
        self.turns = bool(getattr(attention, "use_rope", True))
        """Whether queries and keys are rotated (SmolLM3 leaves it out in some layers)."""
        self.scale = float(attention.scaling)
        self.window = sliding_window(attention)


def sliding_window(attention: Any) -> int:
    """How far back the layer looks; 0 is all the way."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or 0
    # Mistral reads it from the config at every call.
    return getattr(attention.config, "sliding_window", None) or 0 if "Mistral" in type(attention).__name__ else 0


def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """RMS norm as the family computes it (float32 inside)."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)
    return module(x)


class BlockDriver:
    """Calls the model's layers one by one."""

    def __init__(self, model: torch.nn.Module, shape: Shape, merge: Merging = "copy") -> None:
        self.shape = shape
        self.model, self.merge = model, merge
        inner = ModuleDriver(model, shape)
        self.lm, self.quiet = inner.lm, inner.quiet
        self.core = self.lm.model
        self._originals: dict[int, torch.Tensor] = {}
        self.take()

    def take(self) -> None:
        """Look up every module's weight, merged as `merge` says."""
        with torch.inference_mode(False), torch.no_grad():  # parameters may become views of what is made here
            self.weights = Weights(self.model, self.shape.dtype, self.merge, self._originals)
            self.embed, self.head = self.weights.alone(self.core.embed_tokens), self.weights.alone(self.lm.lm_head)
            self.layers = [Layer(layer, self.weights) for layer in self.core.layers]

    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        last: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of the tokens at the indices `last` (None: all); see `Driver`."""
        loud = [m for m in self.quiet if m.training]
        for module in loud:
            module.training = False
        try:
            return linear(self.head, self._hidden(ids, positions, step, last), out)
        finally:
            for module in loud:
                module.training = True

    def _hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep, last: torch.Tensor | None
    ) -> torch.Tensor:
        """What the head is applied to."""
        h = embedded(self.embed, ids)
        cos, sin = (x[0][:, None] for x in self.core.rotary_emb(h, positions[None]))
        n = len(ids)
        for index, layer in enumerate(self.layers):
            q, k, v = self._projected(layer, norm(layer.norm1, h), cos, sin)
            out = step.attend(index, q, k, v, layer.scale, layer.window).reshape(n, -1)
            if last is not None and index + 1 == len(self.layers):
                out, h = out[last], h[last]  # of the others nobody needs more than their keys and values
            h = h + linear(layer.o, out)
            gate, up = layer.gate_up(norm(layer.norm2, h)).chunk(2, -1)
            h = h + linear(layer.down, F.silu(gate).mul_(up))
        return norm(self.core.norm, h)

    def _projected(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values, [tokens, heads, dim] each."""
        shape = self.shape
        heads, both = shape.heads, shape.heads + shape.kv_heads
        qkv = layer.qkv(x).view(len(x), both + shape.kv_heads, shape.head_dim)
        qk = qkv[:, :both]
        if layer.head_norms:
            q_norm, k_norm = layer.head_norms
            qk = torch.cat([norm(q_norm, qk[:, :heads]), norm(k_norm, qk[:, heads:])], 1)
        if layer.turns:
            qk = rotate(qk, cos, sin)
        return qk[:, :heads], qk[:, heads:], qkv[:, both:]

    def refresh(self) -> None:
        """The weights changed: merge again, and make sure joined tensors are still the parameters' own."""
        if self.weights.outdated:
            self.take()
        else:
            self.weights.refresh()

    def release(self) -> None:
        """Merged weights go, until `take`: the model is as if there were no engine."""
        self.layers, self.embed, self.head = [], None, None
        self.weights.release()
