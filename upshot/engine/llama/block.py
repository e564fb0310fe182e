"""The decoder block of Llama-like families, described once for engine and learner.

Llama, Mistral, Qwen2, Qwen3 and SmolLM3 (and models built from their classes: SmolLM2, TinyLlama …) have the same
block. Gemma, OLMo 2 and 3, Phi-3, Granite, Qwen3-MoE and GPT-OSS differ in options: where norms are and how they round,
soft caps, factors, sinks, one weight for q, k and v, partly rotated heads, experts. The engine's drivers (driver.py,
fused.py) and the learner's lean forward call the block's modules one by one, because transformers' own forward spends
more time in Python than in arithmetic when the model or the batch is small. Other families, and adapters on modules
other than projections, embedding and head, run through transformers' forward. Experts are called as a module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from upshot.engine.kernels.plain import EARLY, GELU, LATE, OFFSET, SILU, AttentionOptions, HeadNorms
from upshot.engine.llama.merged import Weights, unmerged_weights
from upshot.engine.llama.shape import causal_lm

ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU}


@dataclass(frozen=True, slots=True)
class Family:
    """What neither a family's modules nor its configuration tell."""

    form: int = EARLY
    """How its norms apply their weights: EARLY, LATE or OFFSET (kernels/plain.py)."""
    core: str = "Model"
    """The class name of the part before the head, without the family's name."""
    capped: bool = False
    """Whether attention scores are soft-capped as the configuration says."""
    scaled: bool = False
    """Whether embeddings are multiplied by the square root of their width, by the model or by their own module."""
    half_angles: bool = False
    """Whether its rotary embedding returns cos and sin of half a head, instead of repeating them for the other half."""


FAMILIES = {
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Phi3", "Granite", "Qwen3Moe"), Family()),
    "Gemma": Family(OFFSET, scaled=True),
    "Gemma2": Family(OFFSET, scaled=True, capped=True),
    "Gemma3": Family(OFFSET, scaled=True, core="TextModel"),
    "Olmo2": Family(LATE),
    "Olmo3": Family(LATE),
    "GptOss": Family(LATE, half_angles=True),
}


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """How a model differs from Llama, read from its configuration; one value for all of its layers."""

    form: int = EARLY
    """How norms apply their weights (kernels/plain.py)."""
    act: int = SILU
    """The MLP's activation: SILU or GELU."""
    eps: float = 1e-6
    """What norms add to the variance."""
    factor: float = 1.0
    """Factor on the output of attention and of the MLP before it is added to the residual stream (Granite)."""
    embed_factor: float = 1.0
    """Factor on the embeddings (Gemma, Granite)."""
    softcap: float = 0.0
    """Soft cap of attention scores (Gemma 2); 0: none."""
    half_angles: bool = False
    logit_divisor: float = 1.0
    """What the logits are divided by (Granite)."""
    logit_cap: float = 0.0
    """Soft cap of the logits (Gemma 2); 0: none."""


def family_of(model: torch.nn.Module) -> str:
    """The prefix of the class names of a model's modules."""
    return type(causal_lm(model)).__name__.removesuffix("ForCausalLM")


def is_block_family(model: torch.nn.Module) -> bool:
    """Whether the model consists of this block, with no wrapper around modules whose forward is bypassed here."""
    lm, name = causal_lm(model), family_of(model)
    if name not in FAMILIES or _activation(lm.config) not in ACTIVATIONS:
        return False
    if getattr(lm.config, "use_bidirectional_attention", False):
        return False
    kinds = {name + kind for kind in ("RMSNorm", "DecoderLayer", "Attention", "MLP", "SparseMoeBlock")}
    kinds.add(name + FAMILIES[name].core)
    return all(type(module).__name__ in kinds for module in _own_parts(lm))


def has_derivative(model: torch.nn.Module) -> bool:
    """Whether the learner has the block's backward pass: not with norms over all heads at once, experts or sinks."""
    return is_block_family(model) and family_of(model) not in ("Olmo2", "Olmo3", "Qwen3Moe", "GptOss")


def has_norms_of_heads(lm: Any) -> bool:
    """Whether the model's blocks norm queries and keys."""
    return hasattr(lm.model.layers[0].self_attn, "q_norm")


def has_norms_after(lm: Any) -> bool:
    """Whether the model's blocks norm the outputs of attention and MLP."""
    return hasattr(lm.model.layers[0], "post_feedforward_layernorm")


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or ""


def _own_parts(lm: Any) -> Iterator[Any]:
    """The modules whose forward is bypassed; none of them may be wrapped."""
    yield lm.model
    yield lm.model.norm
    for layer in lm.model.layers:
        yield from (layer, layer.self_attn, layer.mlp, *_head_norm_modules(layer.self_attn))
        yield from (norm for norm in _norm_modules(layer) if norm is not None)


def _norm_modules(layer: Any) -> tuple[Any, Any, Any, Any]:
    """The norms before and after attention, before and after the MLP; None where a family has no such norm."""
    first, middle = getattr(layer, "input_layernorm", None), layer.post_attention_layernorm
    if not hasattr(layer, "post_feedforward_layernorm"):
        return first, None, middle, None  # Llama: it comes after attention, but norms the MLP's input
    return first, middle, getattr(layer, "pre_feedforward_layernorm", None), layer.post_feedforward_layernorm


def _head_norm_modules(attention: Any) -> list[Any]:
    return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []


def options_of(lm: Any) -> BlockOptions:
    """The options of a model for which `is_block_family` holds."""
    config, family = lm.config, FAMILIES[family_of(lm)]
    embedding = lm.model.embed_tokens
    # In some releases of transformers the embedding module multiplies, in others the model.
    scaled = any(hasattr(module, "embed_scale") for module in embedding.modules())
    root = float(torch.tensor(config.hidden_size**0.5, dtype=lm.model.norm.weight.dtype))
    return BlockOptions(
        form=family.form,
        act=ACTIVATIONS[_activation(config)],
        eps=float(config.rms_norm_eps),
        factor=float(getattr(config, "residual_multiplier", 1.0)),
        embed_factor=root if family.scaled and not scaled else float(getattr(config, "embedding_multiplier", 1.0)),
        softcap=float(config.attn_logit_softcapping or 0.0) if family.capped else 0.0,
        half_angles=family.half_angles,
        logit_divisor=float(getattr(config, "logits_scaling", 1.0)),
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )


class Layer:
    """The modules and settings of one block, looked up once."""

    __slots__ = (
        *("after1", "after2", "attention", "down", "experts", "gate_up", "head_norms", "norm1", "norm2", "o", "qkv"),
        *("rotates", "rotation"),
    )

    def __init__(self, layer: Any, options: BlockOptions, weights: Weights | None = None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        weights = weights or unmerged_weights()
        self.qkv = weights.together(_joined(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")))
        self.o = weights.single(attention.o_proj)
        self.experts = None if hasattr(mlp, "down_proj") else mlp
        """The MLP if it is a mixture of experts; then there is no `gate_up` and no `down`."""
        if self.experts is None:
            self.gate_up = weights.together(_joined(mlp, "gate_up_proj", ("gate_proj", "up_proj")))
            self.down = weights.single(mlp.down_proj)
        self.norm1, self.after1, self.norm2, self.after2 = _norm_modules(layer)
        """The norms before and after attention, before and after the MLP."""
        self.head_norms = _head_norms(attention, options.form)
        """The norms of queries and keys, if the family has them (Qwen3, Gemma 3; OLMo 2: over all heads at once)."""
        self.rotates = bool(getattr(attention, "use_rope", True))
        """Whether queries and keys are rotated (not in some layers of SmolLM3)."""
        kinds = getattr(attention.config, "layer_types", None)
        kind = kinds[attention.layer_idx] if kinds else ""
        self.rotation = kind if kind in (getattr(attention.config, "rope_parameters", None) or {}) else ""
        """Which rotary embedding it uses, if the model has several by layer type (Gemma 3)."""
        scale, sinks = float(attention.scaling), getattr(attention, "sinks", None)
        self.attention = AttentionOptions(scale, sliding_window(attention), options.softcap, sinks)
        """Scale, window, soft cap and sinks."""


def _head_norms(attention: Any, form: int) -> HeadNorms | None:
    if not hasattr(attention, "q_norm"):
        return None
    q_norm, k_norm = _head_norm_modules(attention)
    eps = float(q_norm.variance_epsilon if hasattr(q_norm, "variance_epsilon") else q_norm.eps)
    return HeadNorms(q_norm.weight, k_norm.weight, eps, form)


def _joined(parent: Any, whole: str, parts: tuple[str, ...]) -> list[Any]:
    """The projections of one input; Phi-3 has a single module for all of them."""
    return [getattr(parent, whole)] if hasattr(parent, whole) else [getattr(parent, part) for part in parts]


def sliding_window(attention: Any) -> int:
    """The layer's sliding window in tokens; 0: none."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or 0
    # Mistral and Phi-3 read it from the config at every call.
    reads = any(name in type(attention).__name__ for name in ("Mistral", "Phi3"))
    return getattr(attention.config, "sliding_window", None) or 0 if reads else 0
