"""What a model is made of: counted on a twin of it on the meta device, which has every tensor and no memory."""

from __future__ import annotations

from typing import Any

from upshot.config.recipe import LoraConfig
from upshot.core.errors import UserError
from upshot.engine.llama.block import has_norms_after, has_norms_of_heads, is_block_family
from upshot.engine.llama.linear import TOGETHER
from upshot.engine.llama.shape import attention_sizes
from upshot.models.local import import_frameworks
from upshot.training.adapters import default_targets
from upshot.training.learner.forward.select import is_lean

Sizes = dict[str, tuple[int, ...]]
"""Name of a module → rows and columns of its weight."""


class ModelShape:
    """The sizes of a decoder-only model; `queries` and `keys` are those of all heads of a layer together."""

    def __init__(self, config: Any) -> None:
        """Those of the model that a transformers configuration describes."""
        import_frameworks()
        import torch
        from transformers import AutoModelForCausalLM

        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                twin = AutoModelForCausalLM.from_config(config)
        except (ImportError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"a model of type '{config.model_type}' cannot be built: {reason}") from None
        text, head = config.get_text_config(), twin.get_output_embeddings()
        heads, kv_heads, width = attention_sizes(text)
        self.parameters = sum(parameter.numel() for parameter in twin.parameters())
        self.layers, self.hidden, self.vocab = text.num_hidden_layers, text.hidden_size, head.weight.shape[0]
        self.queries, self.keys, self.mlp = heads * width, kv_heads * width, mlp_width(text)
        self.context = getattr(text, "max_position_embeddings", None) or 0  # most positions; 0: not limited
        self.ends: Sizes = {}  # embeddings and head
        self.linear: Sizes = {}  # all other linear layers: what 8 or 4 bits narrow
        for name, part in twin.named_modules():
            if getattr(getattr(part, "weight", None), "ndim", 0) == 2:
                sizes = self.ends if part is head or isinstance(part, torch.nn.Embedding) else self.linear
                sizes[name] = tuple(part.weight.shape)
        self.projections = sum(rows * columns for rows, columns in self.linear.values())
        self.kv_numbers = 2 * self.layers * self.keys  # of one token
        self.joins = is_block_family(twin)  # the engine runs the blocks itself, and so can merge adapters
        self.lean = is_lean(twin)  # so does the learner
        # Numbers that a token keeps in a layer of the learner's own block for norms of heads and behind halves.
        norms = (self.queries + self.keys) * has_norms_of_heads(twin) if self.lean else 0
        self.norms = norms + (2 * self.hidden * has_norms_after(twin) if self.lean else 0)
        # Heads whose scores have a soft cap: the learner keeps those of all pairs of tokens.
        self.capped = heads if getattr(text, "attn_logit_softcapping", None) else 0

    def adapters(self, lora: LoraConfig) -> list[int]:
        """Weights of the adapters on each layer that is adapted."""
        sizes = self._named(self._targets(lora), {**self.linear, **self.ends})
        return [lora.r * (rows + columns) + rows * (lora.kind == "dora") for rows, columns in sizes]

    def merged(self, lora: LoraConfig, narrow: bool = False) -> int:
        """Weights of the engine's copy with adapters merged into it; `narrow`: of embedding and head alone."""
        targets = self._targets(lora)
        # What is adapted, and what lies in one tensor with it when it is merged.
        targets += [name for group in TOGETHER if set(group) & set(targets) for name in group]
        among = self.ends if narrow else {**self.linear, **self.ends}
        return sum(rows * columns for rows, columns in self._named(targets, among)) if self.joins else 0

    def _targets(self, lora: LoraConfig) -> list[str]:
        leaves = [name.rpartition(".")[2] for name in self.linear]
        return list(lora.targets or default_targets(leaves) or leaves)

    def _named(self, targets: list[str], among: Sizes) -> list[tuple[int, ...]]:
        return [size for name, size in among.items() if f".{name}".endswith(tuple(f".{each}" for each in targets))]


def mlp_width(text: Any) -> int:
    """Numbers between the halves of the MLP for one token; an expert also keeps a row of its own of the input."""
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    width = max(width) if isinstance(width, list | tuple) else width  # Gemma 3n: one for each layer
    if not (experts := getattr(text, "num_experts_per_tok", None)):
        return int(width)
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return int(experts * ((getattr(text, "moe_intermediate_size", None) or width) + text.hidden_size // 2) + shared)
