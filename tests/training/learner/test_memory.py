"""The memory plan: arithmetic from a config.json, the fastest settings that fit, a refusal that says the way out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import tiny_parts
from upshot.cli import main
from upshot.config.load import validate_recipe
from upshot.config.recipe import Recipe
from upshot.core.errors import UserError
from upshot.training.learner.memory.choice import choose, list_settings
from upshot.training.learner.memory.fit import job_of, plan_of
from upshot.training.learner.memory.plan import MemoryJob, MemoryPlan, layer_bytes, optimizer_bytes, parts_of, usable
from upshot.training.learner.memory.shape import SEVEN, ModelShape, read_config
from upshot.training.learner.memory.table import table

GIB = 2**30
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPE = ModelShape.of(LLAMA_8B)
SMALL = ModelShape(576, 30, 9, 3, 64, 1536, 49152, 2048, tied=True)


def made(model: dict[str, Any] | None = None, **more: Any) -> Recipe:
    return validate_recipe({"task": {"name": "slots"}, "model": model or {}, **more})


def plan(gib: float, model: dict[str, Any] | None = None, shape: ModelShape = SHAPE, **more: Any) -> MemoryPlan:
    return plan_of(made(model, **more), shape, 2, int(gib * GIB))


LORA = {"lora": {"r": 32}}


def test_a_config_says_how_many_parameters_there_are() -> None:
    assert SHAPE.parameters == 8_030_261_248, "Llama-3.1-8B's own number"
    assert SMALL.parameters == 134_515_008, "SmolLM2-135M's own number"
    assert SHAPE.adapters(32, SEVEN) == 83_886_080
    assert SHAPE.count_merged(SEVEN) == SHAPE.projections
    assert SHAPE.count_merged(["v_proj"]) == sum(map(SHAPE.count, ("q_proj", "k_proj", "v_proj")))


def test_counts_are_those_of_the_model_itself() -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=80, vocab_size=99, tie_word_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        shape = ModelShape.of(config.to_dict())
        assert sum(p.numel() for p in model.parameters()) == shape.parameters
        targets = ["q_proj", "down_proj", "embed_tokens"]
        lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    assert sum(p.numel() for p in lora.parameters() if p.requires_grad) == shape.adapters(4, targets)


def test_a_large_card_keeps_everything_in_memory() -> None:
    found = plan(139, LORA)
    assert found.setting.checkpointing == "none" and found.setting.merge == "copy" and not found.setting.park
    assert found.setting.tokens == 8192 and found.kv_bytes > 20 * GIB
    learner = sum(p.learning for p in found.parts if p.name not in ("merged adapters", "keys and values"))
    assert learner < 60 * GIB


def test_smaller_cards_give_up_the_cheapest_thing_first() -> None:
    by_size = [plan(gib, LORA).setting for gib in (139, 47, 24)]
    assert [s.park for s in by_size] == [False, True, True]
    assert [s.checkpointing for s in by_size] == ["none", "none", "block"]
    assert [s.merge for s in by_size] == ["copy", "copy", "in place"]


def test_frozen_copies_of_the_policy_forbid_merging_in_place() -> None:
    futures = {"name": "classmates", "classmates": ["policy@start"]}
    job = job_of(made(LORA, futures=futures), SHAPE, 2)
    assert not job.lends and [helper.name for helper in job.helpers] == ["policy@start"]
    assert job.helpers[0].weights == 4 * SHAPE.adapters(32, SEVEN), "what is not trained is shared"
    assert "in place" not in {setting.merge for setting in list_settings(job)}


def test_a_copy_in_8_bits_is_planned_for_and_takes_the_place_of_merged_adapters() -> None:
    for lora in (None, {"r": 32}):
        found = plan(200, {"lora": lora, "engine": {"weights": "fp8"}})
        parts = {part.name: part.sampling for part in found.parts}
        assert parts["weights in 8 bits"] == SHAPE.projections and "merged adapters" not in parts
        assert found.setting.merge == "copy"
    on_head = plan(200, {"lora": {"r": 32, "targets": ["q_proj", "lm_head"]}, "engine": {"weights": "fp8"}})
    assert {p.name: p.sampling for p in on_head.parts}["merged adapters"] == SHAPE.count("lm_head") * 2


def test_an_engine_that_samples_while_the_learner_works_is_never_parked() -> None:
    job = job_of(made(LORA, train={"async_steps": 1}), SHAPE, 2)
    assert next(list_settings(job))
    assert not any(setting.park or setting.merge == "in place" for setting in list_settings(job))


def test_what_does_not_fit_is_refused_with_the_arithmetic_and_what_would() -> None:
    with pytest.raises(UserError) as raised:
        plan(79)
    said = str(raised.value)
    assert "does not fit into 73.3 GiB" in said and "weights 15.0" in said and "optimizer 89.7" in said
    assert "train.optimizer.offload=true" in said and "model.lora={r: 32}" in said
    offloaded = plan(79, train={"optimizer": {"offload": True}})
    assert offloaded.host > 90 * GIB
    assert not any(part.sampling or part.learning for part in offloaded.parts if part.name == "optimizer")
    with pytest.raises(UserError, match="no setting makes it fit"):
        plan(3)


def test_what_the_recipe_says_is_kept_or_refused() -> None:
    assert plan(139, LORA, train={"token_budget": 16384}).setting.tokens == 16384
    assert plan(139, {**LORA, "gradient_checkpointing": True}).setting.checkpointing == "block"
    with pytest.raises(UserError, match=r"train\.token_budget=0"):
        plan(47, {**LORA, "gradient_checkpointing": False}, train={"token_budget": 16384})


def test_the_longest_sequence_fits_into_a_micro_batch() -> None:
    assert plan(139, {**LORA, "max_context": 16384}).setting.tokens == 16384
    assert plan(79, {**LORA, "max_context": 32768}).setting.checkpointing == "block"


def test_less_state_is_planned_for_where_the_recipe_asks_for_it() -> None:
    def optimizer(**train: Any) -> int:
        job = job_of(made(train=train), SHAPE, 2)
        found = parts_of(job, next(list_settings(job)), 0, 0)
        return sum(part.learning for part in found if part.name == "optimizer")

    assert optimizer() == 12 * SHAPE.parameters
    assert optimizer(optimizer="adamw-8bit") < 6.1 * SHAPE.parameters
    assert optimizer(optimizer={"offload": True}) == 0
    plain, quantized = (job_of(made({**LORA, "quantize": bits}), SHAPE, 2) for bits in ("none", "4bit"))
    weights = next(part for part in parts_of(quantized, next(list_settings(quantized)), 0, 0) if part.name == "weights")
    assert weights.learning < 6 * GIB and not quantized.lends
    assert layer_bytes(quantized) > 1.5 * layer_bytes(plain), "its adapters are called, which keeps more"


def test_sft_needs_no_engine() -> None:
    found = plan(139, LORA, train={"method": "sft"})
    assert {p.name for p in found.parts}.isdisjoint({"keys and values", "captured steps", "merged adapters"})
    assert found.kv_bytes == 0 and not found.setting.park


@given(
    gib=st.floats(4, 200), rank=st.sampled_from([0, 8, 64]), tokens=st.sampled_from([0, 2048, 30000]),
    longest=st.sampled_from([0, 512, 9000]), small=st.booleans(), offload=st.booleans(),
)  # fmt: skip
def test_a_plan_stays_within_its_limit_at_both_peaks(
    gib: float, rank: int, tokens: int, longest: int, small: bool, offload: bool
) -> None:
    model: dict[str, Any] = {"max_context": longest} | ({"lora": {"r": rank}} if rank else {})
    train = {"token_budget": tokens, "optimizer": {"name": "adamw-8bit" if small else "adamw", "offload": offload}}
    job, limit = job_of(made(model, train=train), SHAPE, 2), usable(int(gib * GIB))
    found = choose(job, limit)
    if found is None:
        assert all(_needs(job, setting) > limit for setting in list_settings(job))
        return
    assert found.peak <= limit and found.kv_bytes >= job.least * job.kv
    assert found.setting.tokens >= max(longest, tokens)
    more = choose(job, limit + 40 * GIB)
    assert more is not None, "what fits into less fits into more"


def _needs(job: MemoryJob, setting: Any) -> int:
    parts = parts_of(job, setting, job.least * job.kv, 0)
    return max(sum(p.sampling for p in parts), sum(p.learning for p in parts))


def test_helpers_share_keys_and_values_with_the_policy() -> None:
    many = {"prompts_per_step": 64, "group_size": 16}
    job = job_of(made(LORA, futures={"name": "classmates", "classmates": ["policy@start"]}, train=many), SHAPE, 2)
    found = choose(job, usable(139 * GIB))
    assert found is not None
    assert found.helper_kv["policy@start"] == found.kv_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path / "model"


def test_a_dry_run_shows_the_plan_of_a_card_that_is_not_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_parts()[1].save_pretrained(folder)  # a dry run looks for tokenizer and weights, too
    (folder / "model.safetensors").touch()
    words = ["train", "quickstart", "--dry-run", f"model.path={folder}", "model.lora={r: 32}", "warm_start=null"]
    assert main([*words, "model.memory_gb=139"]) == 0
    out = capsys.readouterr().out
    for words_of_it in ("merged adapters", "keys and values", "8.03 B parameters", "micro-batch  8192 tokens"):
        assert words_of_it in out
    assert main([*words, "model.memory_gb=12"]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_the_table_says_what_was_chosen() -> None:
    said = table(plan(24, LORA))
    assert "each block is computed again" in said and "gives its memory back" in said and "merged in place" in said
    assert "host" in said


def test_an_adapters_config_is_that_of_its_base(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    assert read_config(str(adapter)) == LLAMA_8B
    assert read_config("nobody/has-this-model-here") is None


def test_ranks_share_the_optimizer_and_the_sums_of_gradients_but_not_the_weights() -> None:
    alone, four = (job_of(made(), SHAPE, 2, processes=n) for n in (1, 4))
    weights = [next(part for part in parts_of(job, next(list_settings(job)), 0, 0)) for job in (alone, four)]
    assert weights[0] == weights[1]
    (state, sums, passing), shared = optimizer_bytes(alone), optimizer_bytes(four)
    assert shared[:2] == (state // 4, sums // 4)
    assert shared[2] > passing, "gradients arise whole, and one is summed in float32"
    tiny = optimizer_bytes(job_of(made(), replace(SHAPE, layers=1), 2, processes=64))
    assert tiny[0] == 12 * SHAPE.count("embed_tokens"), "a matrix belongs to one rank"
