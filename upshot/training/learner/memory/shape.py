"""What a model is made of: counted on a twin of it on the meta device, which has every tensor and no memory."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch

from upshot.config.recipe import LoraConfig
from upshot.core.errors import UserError
from upshot.engine.llama.block import has_norms_after, has_norms_of_heads, is_block_family
from upshot.engine.llama.linear import TOGETHER
from upshot.engine.llama.shape import attention_sizes
from upshot.models.local import import_frameworks
from upshot.training.adapters import default_targets
from upshot.training.learner.forward.select import is_lean

_SHAPES: dict[str, ModelShape] = {}


def shape_of(config: Any) -> ModelShape:
    """The sizes of the model that a transformers configuration describes; a twin of it is built once."""
    key = f"{type(config)} {config.to_json_string(use_diff=False)}"
    return copy(_SHAPES.get(key) or _SHAPES.setdefault(key, ModelShape(config)))


class ModelShape:
    """The sizes of a decoder-only model; `queries` and `keys` are those of all heads of a layer together."""

    def __init__(self, config: Any) -> None:
        import_frameworks()
        from transformers import AutoModelForCausalLM

        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                twin = AutoModelForCausalLM.from_config(config)
        except (ImportError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"a model of type '{config.model_type}' cannot be built: {reason}") from None
        text, head = config.get_text_config(), twin.get_output_embeddings()
        heads, kv_heads, width = attention_sizes(text)
        self.measured = 0  # bytes that a token of a micro-batch was seen to keep for the backward; 0: unknown
        self.parameters = sum(parameter.numel() for parameter in twin.parameters())
        self.layers, self.hidden, self.vocab = text.num_hidden_layers, text.hidden_size, head.weight.shape[0]
        self.queries, self.keys = heads * width, kv_heads * width
        self.kv_numbers = 2 * self.layers * self.keys  # of one token
        mlp = getattr(text, "intermediate_size", None) or 4 * self.hidden
        mlp = max(mlp) if isinstance(mlp, list | tuple) else mlp  # Gemma 3n: one for each layer
        if experts := getattr(text, "num_experts_per_tok", None):  # each also keeps a row of its own of the input
            mlp = experts * ((getattr(text, "moe_intermediate_size", None) or mlp) + self.hidden // 2)
            mlp += getattr(text, "shared_expert_intermediate_size", None) or 0
        self.mlp = int(mlp)  # numbers between the halves of the MLP for one token
        self.context = getattr(text, "max_position_embeddings", None) or 0  # most positions; 0: not limited
        self.capped = heads if getattr(text, "attn_logit_softcapping", None) else 0  # heads whose scores are kept
        weights: dict[str, Any] = {name: getattr(part, "weight", None) for name, part in twin.named_modules()}
        sizes = {name: tuple(weight.shape) for name, weight in weights.items() if getattr(weight, "ndim", 0) == 2}
        ends = {name for name, part in twin.named_modules() if part is head or isinstance(part, torch.nn.Embedding)}
        self.ends = {name: size for name, size in sizes.items() if name in ends}  # rows and columns
        self.linear = {name: size for name, size in sizes.items() if name not in ends}  # what 8 or 4 bits narrow
        self.projections = sum(rows * columns for rows, columns in self.linear.values())
        self.joins = is_block_family(twin)  # the engine runs the blocks itself, and so can merge adapters
        self.lean = is_lean(twin)  # so does the learner
        of_heads, after = (has_norms_of_heads(twin), has_norms_after(twin)) if self.lean else (False, False)
        self.norms = (self.queries + self.keys) * of_heads + 2 * self.hidden * after  # numbers kept beside Llama's

    def adapters(self, lora: LoraConfig) -> list[int]:
        """Weights of the adapters on each layer that is adapted."""
        sizes = self._adapted(lora, self.linear | self.ends)
        return [lora.r * (rows + columns) + rows * (lora.kind == "dora") for rows, columns in sizes]

    def merged(self, lora: LoraConfig, narrow: bool = False) -> int:
        """Weights of the engine's copy with adapters merged into it; `narrow`: of embedding and head alone."""
        among = self.ends if narrow else self.linear | self.ends
        return sum(rows * columns for rows, columns in self._adapted(lora, among, TOGETHER)) * self.joins

    def _adapted(self, lora: LoraConfig, among: dict[str, Any], groups: Any = ()) -> list[tuple[int, int]]:
        """Sizes of what is adapted, and of what is in one of the `groups` with it."""
        leaves = [name.rpartition(".")[2] for name in self.linear]
        targets = {*(lora.targets or default_targets(leaves) or leaves)}
        targets |= {name for group in groups if targets.intersection(group) for name in group}
        ends = tuple(f".{target}" for target in targets)
        return [size for name, size in among.items() if f".{name}".endswith(ends)]
