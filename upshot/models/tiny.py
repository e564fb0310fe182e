"""A new tiny Llama with its own word-level tokenizer: the policy of the quickstart and of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upshot.config.recipe import TinyConfig
from upshot.models.local import import_frameworks

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<|pad|>", "<|end|>", "<|unknown|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def tiny_tokenizer(words: Sequence[str]) -> Any:
    """A transformers tokenizer that knows just these words, with a chat template."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIALS, *words])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<|unknown|>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens(SPECIALS)
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "unk_token": "<|unknown|>"}
    more = {"additional_special_tokens": SPECIALS[3:], "chat_template": TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, **more)


def tiny_config(config: TinyConfig, vocab: int, **tokens: int) -> Any:
    """The configuration of a tiny Llama; `tokens`: its special ones."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        intermediate_size=config.mlp,
        max_position_embeddings=config.context,
        tie_word_embeddings=True,
        initializer_range=0.06,  # about 1/sqrt(hidden): copying is learned in 50 steps instead of 150 with 0.02
        bos_token_id=None,
        **tokens,
    )


def tiny_model(config: TinyConfig, tokenizer: Any, seed: int) -> Any:
    """A Llama of random weights for a tokenizer."""
    import_frameworks()
    import torch
    from transformers import LlamaForCausalLM

    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(tiny_config(config, len(tokenizer), **ends))
