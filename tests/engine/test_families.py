"""Families of transformers models: run correctly, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from upshot.core.errors import UserError
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.llama import attention, block
from upshot.engine.llama.driver import BlockDriver, ModuleDriver
from upshot.engine.llama.select import disagreement
from upshot.engine.llama.shape import shape_of
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

CAPS = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 5.0}
FACTORS = {
    "residual_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BLOCK: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Qwen2", {}),
    ("Qwen3", {}),
    ("Mistral", {"sliding_window": 12}),
    ("Gemma", {}),
    # Some releases of transformers use sdpa for it, which ignores the soft cap.
    ("Gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 16, "attn_implementation": "eager", **CAPS}),
    ("Gemma3", {"sliding_window": 12, "query_pre_attn_scalar": 16, "num_hidden_layers": 6}),
    ("Olmo2", {}),
    ("Olmo3", {"sliding_window": 12, "num_hidden_layers": 4}),
    ("SmolLM3", {}),
    ("Phi3", {"partial_rotary_factor": 0.75, "sliding_window": 12}),
    ("Granite", {"attention_bias": True, "mlp_bias": True, **FACTORS}),
    ("Qwen3Moe", EXPERTS),
    ("GptOss", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 12}),
]
FAMILIES = [*BLOCK, ("Olmo", {}), ("StableLm", {})]


def build(family: str, over: dict[str, Any]) -> torch.nn.Module:
    config_name = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**SMALL, **over})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases are not ones and zeros after training
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def logprobs_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """The model's own log-probabilities of the ids after each of these; without a cache, which keeps no state of its
    own."""
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    return rows[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize(("family", "over"), FAMILIES, ids=[f for f, _ in FAMILIES])
def test_greedy_ids_match_transformers_for_every_family(family: str, over: dict[str, Any]) -> None:
    model = build(family, over)
    engine = Engine(model, eos_ids=set())
    prompts = [[3 + (5 * i + j) % 90 for j in range(4 + 7 * i)] for i in range(4)]
    seqs = [engine.submit(p, Rules(max_tokens=16, temperature=0))[0] for p in prompts]
    engine.run_until_done()
    for prompt, seq in zip(prompts, seqs, strict=True):
        with torch.no_grad():  # one forward gives the likeliest id at every position
            best = model(input_ids=torch.tensor([seq.ids]), use_cache=False).logits[0].argmax(-1)
        assert seq.ids[len(prompt) :] == best[len(prompt) - 1 : -1].tolist()


@pytest.mark.parametrize(("family", "over"), FAMILIES, ids=[f for f, _ in FAMILIES])
def test_given_and_sampled_ids_have_the_models_own_log_probabilities(family: str, over: dict[str, Any]) -> None:
    model = build(family, over)
    engine = Engine(model, eos_ids=set(), settings=EngineSettings(page_size=4, chunk_tokens=11))
    ids = [3 + (7 * i) % 90 for i in range(40)]
    seqs = [engine.score(ids[:start], ids[start:]) for start in (1, 17, 39)]
    seqs += engine.submit(ids[:17], Rules(max_tokens=8, seed=5), n=3)
    engine.run_until_done()
    for seq in seqs:
        own = logprobs_of(model, seq.ids if len(seq.ids) > seq.prompt_len else ids)[seq.prompt_len - 1 :]
        assert seq.logprobs == pytest.approx(own.tolist(), abs=2e-4)


@pytest.mark.parametrize(("family", "over"), BLOCK, ids=[f for f, _ in BLOCK])
def test_the_block_serves_the_family(family: str, over: dict[str, Any]) -> None:
    assert type(Engine(build(family, over)).runner.driver) is BlockDriver


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_experts_in_16_bits_are_checked_block_by_block_and_a_wrong_block_is_named(family: str) -> None:
    model = build(family, dict(BLOCK)[family]).to(torch.bfloat16)
    driver = BlockDriver(model, shape_of(model))
    assert driver.rough and disagreement(model, driver) is None
    driver.layers[1].experts = driver.layers[0].experts
    assert "block 1: logits differ" in (disagreement(model, driver) or "")


@pytest.mark.parametrize("wrong", [{"form": block.EARLY}, {"capped": False}])
def test_a_wrongly_described_block_is_not_used(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    family, over = next(each for each in BLOCK if each[0] == "Gemma2")
    monkeypatch.setitem(block.FAMILIES, family, replace(block.FAMILIES[family], **wrong))
    with pytest.warns(UserWarning, match="slower driver"):
        engine = Engine(build(family, over))
    assert type(engine.runner.driver) is ModuleDriver


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    ("family", "target"), [("Phi3", "qkv_proj"), ("Gemma3", "embed_tokens"), ("Qwen3Moe", "q_proj")]
)
def test_adapters_on_modules_that_llama_lacks_affect_sampling(family: str, target: str) -> None:
    peft = pytest.importorskip("peft")
    base = build(family, dict(BLOCK)[family])
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=[target])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    engine = Engine(model, eos_ids=set())
    assert type(engine.runner.driver) is BlockDriver
    [seq] = engine.submit([5, 6, 7, 8, 9], Rules(max_tokens=6, seed=3))
    engine.run_until_done()
    assert seq.logprobs == pytest.approx(logprobs_of(model, seq.ids)[4:].tolist(), abs=2e-4)


def test_a_model_with_other_state_is_refused_by_name() -> None:
    config = transformers.T5Config(vocab_size=32, d_model=16, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UserError, match="T5ForConditionalGeneration"):
        Engine(transformers.T5ForConditionalGeneration(config))


def test_a_rotary_embedding_that_depends_on_the_batch_is_refused(make_llama: Callable[..., torch.nn.Module]) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UserError, match="dynamic"):
        Engine(make_llama(rope_parameters=rope))


def test_a_learner_thread_and_an_engine_each_keep_their_own_attention() -> None:
    """With steps played ahead their forwards overlap, and either may end first."""
    configs = [SimpleNamespace(_attn_implementation="eager") for _ in range(2)]
    learner, engine = (SimpleNamespace(config=config, layer_idx=0) for config in configs)
    x, called = torch.zeros(1, 1, 1, 4), []

    def attend_as(name: str) -> attention.Attend:
        return lambda layer, q, k, v, options: called.append(name) or q  # type: ignore[func-returns-value]

    def look(module: Any) -> None:
        attention._attention(module, x, x, x, None)

    step = attention.attend_by(attend_as("engine"), [configs[1]])
    with attention.attend_by(attend_as("learner"), [configs[0]]):
        step.__enter__()
        look(learner)
    look(engine)
    step.__exit__(None, None, None)
    assert called == ["learner", "engine"] and not attention._active
    assert all(config._attn_implementation == "eager" for config in configs)
