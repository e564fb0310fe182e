"""The Llama block, described once for engine and learner: its modules, what is joined, normed and rotated.

The layers of Llama, Mistral, Qwen2, Qwen3 and SmolLM3 (and what is built from their classes: SmolLM2, TinyLlama …) are
the same block. The engine's drivers (block_driver.py, fused.py) and the learner's lean forward call its modules one by
one: transformers' own forward spends more time in Python than in arithmetic when the model or the batch is small.
Families with other blocks, and adapters on other modules than projections, embedding and head, are not described here:
they go through transformers' forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from upshot.engine.kernels.plain import HeadNorms, Rotation
from upshot.engine.llama.driver import causal_lm
from upshot.engine.llama.merged import Weights, unmerged_weights

FAMILIES = {"Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3"}


def is_block_family(model: torch.nn.Module) -> bool:
    """Whether the model is built from the block this file knows, and nothing wraps what is not called."""
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
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, *_head_norm_modules(layer.self_attn)):
            yield norm, "RMSNorm"


def _head_norm_modules(attention: Any) -> list[Any]:
    return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []


class Layer:
    """The modules of one block, looked up once."""

    __slots__ = ("_head_norms", "down", "gate_up", "norm1", "norm2", "o", "qkv", "rotates", "scale", "window")

    def __init__(self, layer: Any, weights: Weights | None = None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        weights = weights or unmerged_weights()
        self.qkv = weights.together([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = weights.together([mlp.gate_proj, mlp.up_proj])
        self.o, self.down = weights.single(attention.o_proj), weights.single(mlp.down_proj)
        self.norm1, self.norm2 = layer.input_layernorm, layer.post_attention_layernorm
        self._head_norms = _head_norm_modules(attention)
        self.rotates = bool(getattr(attention, "use_rope", True))
        """Whether queries and keys are rotated (SmolLM3 leaves it out in some layers)."""
        self.scale = float(attention.scaling)
        self.window = sliding_window(attention)

    @property
    def head_norms(self) -> HeadNorms | None:
        """The norms of queries and keys, if the family has them (Qwen3)."""
        if not self._head_norms:
            return None
        q_norm, k_norm = self._head_norms
        return q_norm.weight, k_norm.weight, float(q_norm.variance_epsilon)


def rotation_at(core: Any, like: Tensor, positions: Tensor) -> Rotation:
    """cos and sin of these positions, [positions, dim / 2], as the model computes them in the dtype of `like`.

    The second half of a head is rotated by the angles of the first, so kernels read each of them once.
    """
    cos, sin = core.rotary_emb(like, positions[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def no_rotation(rotation: Rotation) -> Rotation:
    """cos and sin by which nothing is rotated: one kernel serves layers that rotate and layers that do not."""
    cos, sin = rotation
    return torch.ones_like(cos), torch.zeros_like(sin)


def sliding_window(attention: Any) -> int:
    """How far back the layer looks; 0 is all the way."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or 0
    # Mistral reads it from the config at every call.
    return getattr(attention.config, "sliding_window", None) or 0 if "Mistral" in type(attention).__name__ else 0
