"""How the engine gets logits out of a transformers model: the shape of its cache, and one forward over packed tokens.

`ModuleDriver` calls the model itself. `BlockDriver` (block_driver.py) calls the model's own layers one by one, with
less overhead. Both use the live parameters. What cannot be driven is refused by name, and the first forward is compared
with the model's own before anything else runs (select.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upshot.core.errors import UserError
from upshot.engine.llama.attention import AttentionStep, attend_by, over_tokens
from upshot.engine.llama.linear import write_to


@dataclass(frozen=True, slots=True)
class Shape:
    """What the cache must hold."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_length: int
    dtype: torch.dtype
    device: torch.device


class Driver(ABC):
    """One forward over packed tokens, with the live parameters; it keeps no copies of them unless it says so."""

    shape: Shape
    lm: Any
    """The causal LM."""
    rough = False
    """Whether its logits are only near the model's."""
    has_adapters = False
    """Whether it reads adapters itself, merged or not."""
    by_block = False
    """Whether each of its blocks can be compared with the model's own."""

    @abstractmethod
    def logits(
        self, ids: Tensor, positions: Tensor, step: AttentionStep, last: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Logits of the tokens at the indices `last` (None: all), in `out` if one of their dtype is given."""

    def take(self) -> None:
        """Look up the weights again after `release`."""

    def refresh(self) -> None:
        """The weights changed."""

    def release(self) -> None:
        """Keep nothing but the model itself, until `take`."""

    def pointers(self) -> list[int]:
        """Addresses of weights that are not the model's own; captured steps read from them."""
        return []


def causal_lm(model: torch.nn.Module) -> Any:
    """The causal LM inside adapter wrappers."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def shape_of(model: torch.nn.Module) -> Shape:
    """The cache's shape, or a `UserError` that says why the model cannot be driven."""
    lm = causal_lm(model)
    name = type(lm).__name__
    config = getattr(lm, "config", None)
    if config is None or lm.get_output_embeddings() is None:
        raise UserError(f"the engine drives transformers causal language models; {name} has no config or output head")
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            raise UserError(
                f"the engine cannot drive {type(adapter).__name__.removesuffix('Config')}: "
                "it adds its own ids to every prompt; use LoRA or another adapter that changes weights"
            )
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"the engine drives decoder-only models; {name} is an encoder-decoder")
    if odd := odd_layers(lm):
        raise UserError(f"the engine cannot drive {name}: {odd}")
    rope = getattr(text, "rope_parameters", None) or {}
    rope_types = {str(r.get("rope_type")) for r in [rope, *rope.values()] if isinstance(r, dict)}
    moving = rope_types & {"dynamic", "longrope"}
    if moving:
        raise UserError(
            f"the engine cannot drive {name}: its rotary embedding ({', '.join(sorted(moving))}) depends on the batch"
        )
    weight, vocab = lm.get_input_embeddings().weight, lm.get_output_embeddings().weight.shape[0]
    longest = getattr(text, "max_position_embeddings", None) or 1 << 20
    return Shape(text.num_hidden_layers, *attention_sizes(text), vocab, longest, weight.dtype, weight.device)


def attention_sizes(text: Any) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and their width, by a text configuration; zeros where nothing attends."""
    heads = getattr(text, "num_attention_heads", None) or 0
    width = getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1)
    return heads, getattr(text, "num_key_value_heads", None) or heads, width


def odd_layers(lm: Any) -> str | None:
    """Which layers attend neither to everything nor to a window, by the model's configuration; None: there are none."""
    kinds = set(getattr(lm.config.get_text_config(), "layer_types", None) or ())
    odd = sorted(kinds - {"full_attention", "sliding_attention"})
    return f"layers of type {', '.join(odd)} keep other state than keys and values" if odd else None


def configs_of(lm: Any) -> list[Any]:
    """Every configuration that says which attention a part of the model uses."""
    configs = {id(c): c for c in (lm.config, lm.config.get_text_config())}
    for module in lm.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    return list(configs.values())


def quiet_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules whose training mode changes what they compute or how: dropout and gradient checkpointing."""
    return [
        m
        for m in model.modules()
        if isinstance(m, torch.nn.modules.dropout._DropoutNd) or hasattr(m, "gradient_checkpointing")
    ]


@contextmanager
def out_of_training(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, none of these modules is in training mode; set one by one, since modes may differ inside a model."""
    loud = [module for module in modules if module.training]
    for module in loud:
        module.training = False
    try:
        yield
    finally:
        for module in loud:
            module.training = True


class ModuleDriver(Driver):
    """Calls the model itself, with our attention function."""

    def __init__(self, model: torch.nn.Module, shape: Shape) -> None:
        self.shape = shape
        self.lm = causal_lm(model)
        self.configs = configs_of(self.lm)
        self.quiet = quiet_modules(model)

    def logits(
        self, ids: Tensor, positions: Tensor, step: AttentionStep, last: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Logits of the tokens at the indices `last` (None: all); see `Driver`."""
        with attend_by(over_tokens(step.attend), self.configs, sinks=True), out_of_training(self.quiet):
            inputs = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": None}
            done = self.lm(**inputs, use_cache=False, logits_to_keep=0 if last is None else last)
        return write_to(out, done.logits[0])
