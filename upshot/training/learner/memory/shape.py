"""What a model is made of, from its config.json alone: counts of parameters and of numbers a token has. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Projections whose weights lie side by side where adapters are merged."""
SEVEN = tuple(name for group in GROUPS for name in group)
OTHER_NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
}  # fmt: skip
"""What older families call the same."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    context: int
    """Most positions."""
    tied: bool = False
    """Whether embedding and head are one matrix."""
    family: str = "llama"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape that a config.json describes."""
        text: Mapping[str, Any] = config.get("text_config") or config
        text = {own: text[other] for other, own in OTHER_NAMES.items() if other in text} | dict(text)
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        return cls(
            hidden=hidden,
            layers=int(text["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            mlp=int(text.get("intermediate_size") or 4 * hidden),
            vocab=int(text["vocab_size"]),
            context=int(text.get("max_position_embeddings") or 0),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            family=str(text.get("model_type") or config.get("model_type") or ""),
        )

    @property
    def queries(self) -> int:
        """Numbers of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token in one layer, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.keys

    def sizes(self, name: str) -> tuple[int, int, int]:
        """Inputs and outputs of a projection, of the embedding or the head, and how many there are of it."""
        known = {
            "q_proj": (self.hidden, self.queries),
            "k_proj": (self.hidden, self.keys),
            "v_proj": (self.hidden, self.keys),
            "o_proj": (self.queries, self.hidden),
            "gate_proj": (self.hidden, self.mlp),
            "up_proj": (self.hidden, self.mlp),
            "down_proj": (self.mlp, self.hidden),
            "embed_tokens": (self.vocab, self.hidden),
            "lm_head": (self.hidden, self.vocab),
        }
        return *known.get(name, (self.hidden, self.hidden)), self.layers if name in SEVEN else 1

    def count(self, *names: str) -> int:
        """Weights of these names in the whole model."""
        return sum(inner * outer * times for inner, outer, times in map(self.sizes, names))

    @property
    def projections(self) -> int:
        """Weights of all projections of all layers."""
        return self.count(*SEVEN)

    @property
    def parameters(self) -> int:
        """All weights: projections, embedding and head, norms."""
        ends = self.count("embed_tokens") * (1 if self.tied else 2)
        return self.projections + ends + self.hidden * (2 * self.layers + 1)

    def adapters(self, rank: int, targets: Sequence[str], dora: bool = False) -> int:
        """Weights of LoRA adapters on the targets."""
        sizes = map(self.sizes, targets)
        return sum((rank * (inner + outer) + outer * dora) * times for inner, outer, times in sizes)

    def count_merged(self, targets: Sequence[str]) -> int:
        """Weights that the engine has a second time where adapters on the targets are merged into a copy."""
        beside = [name for group in GROUPS if set(group) & set(targets) for name in group]
        return self.count(*beside, *(name for name in ("embed_tokens", "lm_head") if name in targets))


def read_config(folder: str) -> Mapping[str, Any] | None:
    """The config.json of a folder, or of a hub name whose files are on this machine; None where it is not here."""
    path = Path(folder).expanduser()
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        return read_config(str(json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"]))
    if not path.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(folder, "config.json")
        except HFValidationError:
            return None
        if not isinstance(found, str):
            return None
        path = Path(found).parent
    config: Mapping[str, Any] = json.loads((path / "config.json").read_text())
    return config
