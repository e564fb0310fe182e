"""Reads from a transformers model what the engine needs: sizes of the KV cache, and whether it can be driven at all.

`Engine` calls `shape_of` first; everything else here is shared with drivers and the learner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from upshot.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the KV cache and the vocabulary; `max_length`: ids of prompt and reply together."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_length: int
    dtype: torch.dtype
    device: torch.device


def causal_lm(model: torch.nn.Module) -> Any:
    """The causal LM itself, without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def shape_of(model: torch.nn.Module) -> Shape:
    """The model's sizes, or a `UserError` that says why the engine cannot drive it."""
    lm = causal_lm(model)
    name = type(lm).__name__
    config = getattr(lm, "config", None)
    if config is None or lm.get_output_embeddings() is None:
        raise UserError(f"the engine runs transformers' causal language models; {name} has no config or output head")
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            raise UserError(
                f"the engine cannot run {type(adapter).__name__.removesuffix('Config')}: "
                "it adds its own ids to every prompt; use LoRA or another adapter that changes weights"
            )
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"the engine runs decoder-only models; {name} is an encoder-decoder")
    if odd := odd_layers(lm):
        raise UserError(f"the engine cannot run {name}: {odd}")
    rope = getattr(text, "rope_parameters", None) or {}
    rope_types = {str(r.get("rope_type")) for r in [rope, *rope.values()] if isinstance(r, dict)}
    moving = rope_types & {"dynamic", "longrope"}
    if moving:
        raise UserError(
            f"the engine cannot run {name}: its rotary embedding ({', '.join(sorted(moving))}) depends on the batch"
        )
    weight, vocab = lm.get_input_embeddings().weight, lm.get_output_embeddings().weight.shape[0]
    longest = getattr(text, "max_position_embeddings", None) or 1 << 20
    return Shape(text.num_hidden_layers, *attention_sizes(text), vocab, longest, weight.dtype, weight.device)


def attention_sizes(text: Any) -> tuple[int, int, int]:
    """Number of query heads, of key heads, and their width; zeros for a model without attention."""
    heads = getattr(text, "num_attention_heads", None) or 0
    width = getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1)
    return heads, getattr(text, "num_key_value_heads", None) or heads, width


def odd_layers(lm: Any) -> str | None:
    """A message about layers without full or sliding-window attention, by the configuration; None if there are none."""
    kinds = set(getattr(lm.config.get_text_config(), "layer_types", None) or ())
    odd = sorted(kinds - {"full_attention", "sliding_attention"})
    return f"layers of type {', '.join(odd)} keep other state than keys and values" if odd else None


def configs_of(lm: Any) -> list[Any]:
    """Every configuration object from which a part of the model reads its attention implementation."""
    configs = {id(c): c for c in (lm.config, lm.config.get_text_config())}
    for module in lm.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    return list(configs.values())
