"""Families of transformers models: driven, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from upshot.core.errors import UserError
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.sequence import Rules

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Qwen2", {}),
    ("Qwen3", {}),
    ("Mistral", {"sliding_window": 12}),
    ("Gemma", {}),
    # Some releases of transformers take sdpa for it, which leaves out the soft cap.
    ("Gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 16, "attn_implementation": "eager"}),
    ("Gemma3", {"sliding_window": 12, "query_pre_attn_scalar": 16}),
    ("Olmo", {}),
    ("Olmo2", {}),
    ("Olmo3", {"sliding_window": 12}),
    ("SmolLM3", {}),
    ("Phi3", {}),
    ("Granite", {}),
    ("StableLm", {}),
]


def build(family: str, over: dict[str, Any]) -> torch.nn.Module:
    config_name = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**SMALL, **over})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize(("family", "over"), FAMILIES, ids=[f for f, _ in FAMILIES])
def test_greedy_ids_match_transformers_for_every_family(family: str, over: dict[str, Any]) -> None:
    model = build(family, over)
    engine = Engine(model, eos_ids=set())
    prompts = [[3 + (5 * i + j) % 90 for j in range(4 + 7 * i)] for i in range(4)]
    seqs = [engine.submit(p, Rules(max_tokens=16, temperature=0))[0] for p in prompts]
    engine.run_until_done()
    for prompt, seq in zip(prompts, seqs, strict=True):
        ids = list(prompt)
        for _ in range(16):  # the plain forward without a cache is the reference that has no state of its own
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert seq.ids == ids


@pytest.mark.parametrize(("family", "over"), FAMILIES, ids=[f for f, _ in FAMILIES])
def test_given_ids_have_the_models_own_log_probabilities_for_every_family(family: str, over: dict[str, Any]) -> None:
    model = build(family, over)
    engine = Engine(model, settings=EngineSettings(page_size=4, chunk_tokens=11))
    ids = [3 + (7 * i) % 90 for i in range(40)]
    seqs = [engine.score(ids[:start], ids[start:]) for start in (1, 17, 39)]
    engine.run_until_done()
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    for seq in seqs:
        own = [float(rows[i - 1, ids[i]]) for i in range(seq.prompt_len, 40)]
        assert seq.logprobs == pytest.approx(own, abs=2e-4)


def test_a_model_with_other_state_is_refused_by_name() -> None:
    config = transformers.T5Config(vocab_size=32, d_model=16, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UserError, match="T5ForConditionalGeneration"):
        Engine(transformers.T5ForConditionalGeneration(config))


def test_a_rotary_embedding_that_depends_on_the_batch_is_refused(make_llama: Callable[..., torch.nn.Module]) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UserError, match="dynamic"):
        Engine(make_llama(rope_parameters=rope))
