"""What a model is made of: counted on a twin of it on the meta device, which has every tensor and no memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from upshot.config.recipe import LoraConfig
from upshot.core.errors import UserError
from upshot.engine.llama.block import has_norms_after, has_norms_of_heads, is_block_family
from upshot.engine.llama.driver import attention_sizes
from upshot.engine.llama.linear import TOGETHER
from upshot.models.local import adapter_config, import_frameworks, local_path
from upshot.training.adapters import default_targets
from upshot.training.learner.forward.select import is_lean

Sizes = Mapping[str, tuple[int, ...]]
"""Name of a module → rows and columns of its weight."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model; `queries` and `keys` are those of all heads of a layer together."""

    parameters: int
    layers: int
    hidden: int
    queries: int
    keys: int
    mlp: int
    vocab: int
    context: int
    """Most positions; 0: not limited."""
    linear: Sizes
    """Linear layers but the head: what 8 or 4 bits narrow."""
    ends: Sizes
    """Embeddings and head."""
    joins: bool
    """Whether the engine runs the blocks itself, and so can merge adapters."""
    lean: bool
    """Whether the learner does."""
    norms: int = 0
    """Numbers that a token keeps in a layer of the learner's own block for norms of heads and behind halves."""
    capped: int = 0
    """Heads whose scores have a soft cap: the learner keeps those of all pairs of tokens."""

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """The shape of the model that a transformers configuration describes."""
        from torch import nn

        twin, text = _twin_of(config), config.get_text_config()
        heads, kv_heads, width = attention_sizes(text)
        queries, keys, hidden, lean = heads * width, kv_heads * width, text.hidden_size, is_lean(twin)
        head, sizes = twin.get_output_embeddings(), {True: dict[str, tuple[int, ...]](), False: {}}
        for name, part in twin.named_modules():
            if getattr(getattr(part, "weight", None), "ndim", 0) == 2:
                sizes[part is head or isinstance(part, nn.Embedding)][name] = tuple(part.weight.shape)
        normed = (queries + keys) * has_norms_of_heads(twin) + 2 * hidden * has_norms_after(twin) if lean else 0
        return cls(
            sum(parameter.numel() for parameter in twin.parameters()), text.num_hidden_layers, hidden, queries, keys,
            mlp_width(text), head.weight.shape[0], getattr(text, "max_position_embeddings", None) or 0,
            sizes[False], sizes[True], is_block_family(twin), lean, normed,
            heads if getattr(text, "attn_logit_softcapping", None) else 0,
        )  # fmt: skip

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.keys

    @cached_property
    def projections(self) -> int:
        """Weights of all linear layers but the head."""
        return sum(rows * columns for rows, columns in self.linear.values())

    def adapters(self, lora: LoraConfig) -> list[int]:
        """Weights of the adapters on each layer that is adapted."""
        sizes = self._named(lora, {**self.linear, **self.ends})
        return [lora.r * (rows + columns) + rows * (lora.kind == "dora") for rows, columns in sizes]

    def merged(self, lora: LoraConfig, narrow: bool = False) -> int:
        """Weights of the engine's copy with adapters merged into it; `narrow`: of embedding and head alone."""
        among = self.ends if narrow else {**self.linear, **self.ends}
        return sum(rows * columns for rows, columns in self._named(lora, among, True)) if self.joins else 0

    def _named(self, lora: LoraConfig, among: Sizes, beside: bool = False) -> list[tuple[int, ...]]:
        """Sizes of what is adapted; `beside`: and of what lies in one tensor with it when it is merged."""
        leaves = [name.rpartition(".")[2] for name in self.linear]
        targets = lora.targets or default_targets(leaves) or leaves
        if beside:
            targets = [*targets, *(name for group in TOGETHER if set(group) & set(targets) for name in group)]
        return [size for name, size in among.items() if f".{name}".endswith(tuple(f".{each}" for each in targets))]


def _twin_of(config: Any) -> Any:
    import_frameworks()
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"a model of type '{config.model_type}' cannot be built: {' '.join(str(error).split())}"
        ) from None


def mlp_width(text: Any) -> int:
    """Numbers between the halves of the MLP for one token; an expert also keeps a row of its own of the input."""
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    width = max(width) if isinstance(width, list | tuple) else width  # Gemma 3n: one for each layer
    if not (experts := getattr(text, "num_experts_per_tok", None)):
        return int(width)
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return int(experts * ((getattr(text, "moe_intermediate_size", None) or width) + text.hidden_size // 2) + shared)


def find_config(name: str) -> Any | None:
    """The configuration of a folder or hub name (of an adapter: its base model's); None: it is not on this machine."""
    from transformers import AutoConfig

    while (adapter := adapter_config(name, offline=True)) is not None:
        name = adapter["base_model_name_or_path"]
    try:
        return AutoConfig.from_pretrained(local_path(name), local_files_only=True)
    except OSError:
        return None
    except (ValueError, KeyError) as error:
        raise UserError(f"cannot read the configuration of '{name}': {' '.join(str(error).split())[:200]}") from None
