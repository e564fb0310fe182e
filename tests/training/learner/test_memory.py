"""The memory plan: computed from a config.json, the fastest settings that fit, and refusals that name alternatives."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.tiny import tiny_parts
from upshot.cli import main
from upshot.config.load import validate_recipe
from upshot.config.phases import WARM_START, phase_config
from upshot.config.recipe import LoraConfig, PolicyConfig, Recipe
from upshot.core.errors import UserError
from upshot.engine.kernels.plain import AttentionOptions, attention
from upshot.models.local import find_config
from upshot.run.forecast import memory_table
from upshot.training.adapters import add_lora
from upshot.training.learner.forward.measure import measure_kept
from upshot.training.learner.memory.fit import ENOUGH_KV, choose, list_settings, plan_of, plan_recipe
from upshot.training.learner.memory.plan import MemoryJob, MemoryPlan, MemorySetting, make_plan, usable
from upshot.training.learner.memory.shape import ModelShape

GIB = 2**30
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
SMOLLM2_135M = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
TINYLLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 80, "vocab_size": 99, "head_dim": 16}


@cache
def shape_from(text: str) -> ModelShape:
    return ModelShape(AutoConfig.for_model(**json.loads(text)))


def shape_of(config: dict[str, Any]) -> ModelShape:
    return shape_from(json.dumps(config))


SHAPE = shape_of(LLAMA_8B)


def made(model: dict[str, Any] | None = None, **more: Any) -> Recipe:
    return validate_recipe({"task": {"name": "slots"}, "model": model or {}, **more})


def plan(gib: float, model: dict[str, Any] | None = None, shape: ModelShape = SHAPE, **more: Any) -> MemoryPlan:
    return plan_of(MemoryJob(made(model, **more), shape, 2), int(gib * GIB))


def changed(shape: ModelShape, **values: Any) -> ModelShape:
    other = copy(shape)
    vars(other).update(values)
    return other


def parts_of(job: MemoryJob) -> dict[str, int]:
    """Bytes of each part while the learner works, with the first setting."""
    return {part.name: part.learning for part in make_plan(job, next(list_settings(job)), 0).parts}


LORA = {"lora": {"r": 32}}


def test_a_config_says_how_many_parameters_there_are() -> None:
    assert SHAPE.parameters == 8_030_261_248, "Llama-3.1-8B's own number"
    assert shape_of(SMOLLM2_135M).parameters == 134_515_008, "SmolLM2-135M's own number"
    assert shape_of(QWEN3_30B_A3B).parameters == 30_532_122_624, "Qwen3-30B-A3B's own number, all experts among them"
    assert sum(SHAPE.adapters(LoraConfig(r=32))) == 83_886_080
    assert SHAPE.merged(LoraConfig(r=32)) == SHAPE.projections
    of_attention = [
        rows * columns for name, (rows, columns) in SHAPE.linear.items() if name[-6:-4] in ("q_", "k_", "v_")
    ]
    assert SHAPE.merged(LoraConfig(r=32, targets=["v_proj"])) == sum(of_attention)


def test_a_mixture_of_experts_does_not_fit_where_only_the_experts_of_a_token_would() -> None:
    with pytest.raises(UserError, match=r"weights 56\.9"):
        plan(40, LORA, shape=shape_of(QWEN3_30B_A3B))


@pytest.mark.parametrize(
    "family", ["gemma", "gemma2", "gemma3_text", "phi3", "granite", "mistral", "qwen2", "qwen3", "smollm3"]
)
def test_a_family_whose_block_the_learner_runs_is_planned_like_llama(family: str) -> None:
    plain, own = (shape_of({"model_type": kind, "pad_token_id": 0, **SIZES}) for kind in ("llama", family))
    assert own.lean and own.joins
    job = MemoryJob(made(), own, 2)
    norms = (2 * 48 if family in ("gemma2", "gemma3_text") else 0) + (
        64 + 32 if family in ("gemma3_text", "qwen3") else 0
    )
    capped = 4 * 10 * job.longest if family == "gemma2" else 0
    assert job.kept == MemoryJob(made(), plain, 2).kept + 3 * (2 * norms + capped)


def test_soft_caps_are_planned_for_all_pairs_of_tokens() -> None:
    """Only flash attention and the library's avoid storing the scores, and neither supports caps."""
    shape = shape_of({"model_type": "gemma2", "pad_token_id": 0, **SIZES})
    short, long = (MemoryJob(made({"max_context": n}), shape, 2).kept for n in (1024, 2048))
    assert long - short == 3 * 4 * 10 * 1024
    scores: dict[int, int] = {}
    q, k, v = (torch.randn(1, n, 256, 16, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))

    def count(x: Tensor) -> Tensor:
        scores[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        out = attention(q, k, v, None, AttentionOptions(0.25, 0, 50.0))
    assert sum(scores.values()) / (4 * 256 * 256) == pytest.approx(10, rel=0.1) and out.shape == q.shape


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3n_text", **SIZES, "intermediate_size": [64, 64, 80], "num_kv_shared_layers": 1,
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99, "laurel_rank": 4,
         "layer_types": ["full_attention"] * 3, "activation_sparsity_pattern": [0.0] * 3},
        {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 99},
        {"model_type": "mamba", "hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 99},
        {"model_type": "olmo2", **SIZES}, {"model_type": "mixtral", **SIZES},
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_any_family_that_transformers_builds_can_be_planned(config: dict[str, Any]) -> None:
    own = shape_of({"pad_token_id": 0, **config})
    assert not own.lean and own.mlp in (80, 96, 192, 160 + 2 * 24) and own.parameters > 10_000
    assert plan(24, shape=own, train={"method": "sft"}).learning > 14 * own.parameters


def test_a_model_that_cannot_be_built_is_refused_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(config: Any) -> Any:
        raise ImportError("Towers need the\ntimm library")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", build)
    with pytest.raises(UserError, match="type 'llama' cannot be built: Towers need the timm library"):
        ModelShape(AutoConfig.for_model(**LLAMA_8B))


@pytest.mark.parametrize(
    ("config", "lora", "gib", "sampling", "learning"),
    [(SMOLLM2_135M, 0, 139.2, 6.15, 17.62), (TINYLLAMA_1B, 0, 139.2, 18.50, 29.89), (LLAMA_8B, 32, 139.2, 51.56, 74.45),
     (LLAMA_8B, 32, 47, 42.79, 41.33)],
    ids=["135M", "1.1B", "8B", "8B in 47 GiB"],
)  # fmt: skip
def test_predictions_are_near_what_was_measured_on_a_gpu(
    config: dict[str, Any], lora: int, gib: float, sampling: float, learning: float
) -> None:
    """The measured peaks of the journal, "Memory, predicted and measured", GiB."""
    model = {"max_context": 1280} | ({"lora": {"r": lora, "dropout": 0.0}} if lora else {})
    more = {"episode": {"max_tokens": 256}, "train": {"lr": 1e-6, "kl": 0.0}}
    shape = shape_of(config | {"max_position_embeddings": 4096})
    asked = Recipe.model_validate({"task": "slots", "model": model, **more})
    found = plan_of(MemoryJob(asked, shape, 2), int(gib * GIB))
    assert found.sampling / GIB == pytest.approx(sampling, rel=0.1)
    assert found.learning / GIB == pytest.approx(learning, rel=0.1)


def test_as_many_keys_and_values_as_the_context_holds_where_nothing_bounds_what_others_say() -> None:
    """Episodes of 16,000 tokens whose policy writes four tokens in each of ten turns; the rest is from the
    environment."""
    episode = {"max_turns": 10, "max_tokens": 4}
    recipe = {"task": "slots", "episode": episode, "train": {"prompts_per_step": 2, "group_size": 2}}
    job = MemoryJob(Recipe.model_validate(recipe), shape_of(TINYLLAMA_1B | {"max_position_embeddings": 20480}), 2)
    assert job.longest < 2048 and plan_of(job, 140 * GIB).kv_bytes == 4 * 20480 * job.kv


@pytest.mark.parametrize(
    ("config", "tokens", "again", "layers", "measured"),
    [
        (TINYLLAMA_1B, 2048, "none", None, 22.3), (TINYLLAMA_1B, 8192, "none", None, 27.7),
        (TINYLLAMA_1B, 32768, "none", None, 50.6), (TINYLLAMA_1B, 65536, "none", None, 76.7),
        (LLAMA_8B, 2048, "none", None, 24.5), (LLAMA_8B, 8192, "none", None, 44.0),
        (LLAMA_8B, 32768, "none", None, 121.1), (LLAMA_8B, 32768, "mlp", None, 60.6),
        (LLAMA_8B, 65536, "mlp", None, 106.4), (LLAMA_8B, 32768, "mlp", 22, 78.0),
        (LLAMA_8B, 32768, "mlp", 20, 81.8), (LLAMA_8B, 32768, "mlp", 18, 85.6),
    ],
)  # fmt: skip
def test_the_peak_of_learning_is_within_a_tenth_of_what_was_measured_at_every_length(
    config: dict[str, Any], tokens: int, again: Any, layers: int | None, measured: float
) -> None:
    """GB of docs/performance.md and of the journal, "Long contexts": one sequence a micro-batch, 8B with LoRA."""
    lora = {"lora": {"r": 32, "dropout": 0.0}} if config is LLAMA_8B else {}
    train = {"method": "sft", "token_budget": tokens}
    job = MemoryJob(made({**lora, "gradient_checkpointing": again}, train=train), shape_of(config), 2)
    assert make_plan(job, MemorySetting(tokens, again, layers), 0).learning / 1e9 == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("dora", [False, True])
def test_counts_are_those_of_the_model_itself(dora: bool) -> None:
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=80, vocab_size=99, tie_word_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        shape = ModelShape(config)
        assert sum(p.numel() for p in model.parameters()) == shape.parameters
        targets = ["q_proj", "down_proj"] if dora else ["q_proj", "embed_tokens"]
        lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, use_dora=dora))
    own = LoraConfig(r=4, targets=targets, kind="dora" if dora else "lora")
    assert sum(p.numel() for p in lora.parameters() if p.requires_grad) == sum(shape.adapters(own))


def test_a_large_card_keeps_everything_in_memory() -> None:
    found = plan(139, LORA)
    assert found.setting.checkpointing == "none" and found.setting.merge == "copy" and not found.setting.park
    assert found.setting.tokens == 8192 and found.kv_bytes > 20 * GIB
    learner = sum(p.learning for p in found.parts if p.name not in ("merged adapters", "keys and values"))
    assert learner < 60 * GIB


def test_smaller_cards_give_up_the_cheapest_option_first() -> None:
    by_size = [plan(gib, LORA).setting for gib in (139, 47, 24)]
    assert [s.park for s in by_size] == [False, True, True]
    assert [s.checkpointing for s in by_size] == ["none", "none", "block"]
    assert [s.merge for s in by_size] == ["copy", "copy", "in place"]


def test_frozen_copies_of_the_policy_forbid_merging_in_place() -> None:
    futures = {"name": "classmates", "classmates": ["policy@start"]}
    job = MemoryJob(made(LORA, futures=futures), SHAPE, 2)
    assert [helper.name for helper in job.helpers] == ["policy@start"] and not job.swappable
    assert job.helpers[0].weights == 4 * sum(SHAPE.adapters(LoraConfig(r=32))), "what is not trained is shared"
    assert "in place" not in {setting.merge for setting in list_settings(job)}


def test_a_copy_in_8_bits_is_planned_for_and_takes_the_place_of_merged_adapters() -> None:
    for lora in (None, {"r": 32}):
        found = plan(200, {"lora": lora, "engine": {"weights": "fp8"}})
        parts = {part.name: part.sampling for part in found.parts}
        assert parts["weights in 8 bits"] == SHAPE.projections and "merged adapters" not in parts
        assert found.setting.merge == "copy"
    on_head = plan(200, {"lora": {"r": 32, "targets": ["q_proj", "lm_head"]}, "engine": {"weights": "fp8"}})
    assert {p.name: p.sampling for p in on_head.parts}["merged adapters"] == 4096 * 128256 * 2


def test_an_engine_that_samples_while_the_learner_works_is_never_parked() -> None:
    job = MemoryJob(made(LORA, train={"async_steps": 1}), SHAPE, 2)
    assert next(list_settings(job))
    assert not any(setting.park or setting.merge == "in place" for setting in list_settings(job))


def test_a_plan_that_does_not_fit_is_refused_with_the_numbers_and_alternatives() -> None:
    with pytest.raises(UserError) as raised:
        plan(79)
    said = str(raised.value)
    assert "does not fit into 73.3 GiB" in said and "weights 15.0" in said and "optimizer 89.7" in said
    assert "train.optimizer.offload=true" in said and "model.lora={r: 32}" in said
    offloaded = plan(79, train={"optimizer": {"offload": True}})
    assert sum(part.host for part in offloaded.parts) > 90 * GIB
    assert not any(part.sampling or part.learning for part in offloaded.parts if part.name == "optimizer")
    with pytest.raises(UserError, match="no setting makes it fit"):
        plan(3)


def test_settings_of_the_recipe_are_kept_or_refused() -> None:
    assert plan(139, LORA, train={"token_budget": 16384}).setting.tokens == 16384
    assert plan(139, {**LORA, "gradient_checkpointing": True}).setting.checkpointing == "block"
    with pytest.raises(UserError, match=r"train\.token_budget=0"):
        plan(47, {**LORA, "gradient_checkpointing": False}, train={"token_budget": 16384})


def test_the_longest_sequence_fits_into_a_micro_batch() -> None:
    assert plan(139, {**LORA, "max_context": 16384}).setting.tokens == 16384
    assert plan(100, {"lora": {"r": 32, "dropout": 0.0}, "max_context": 32768}).setting.checkpointing == "mlp"
    assert plan(60, {**LORA, "max_context": 32768}).setting.checkpointing == "block"


@pytest.mark.parametrize("gib", [80, 90, 100])
def test_no_more_layers_are_computed_again_than_the_memory_asks_for(gib: int) -> None:
    model = {"lora": {"r": 32, "dropout": 0.0}, "max_context": 32768}
    job, limit, setting = MemoryJob(made(model), SHAPE, 2), usable(gib * GIB), plan(gib, model).setting
    assert setting.checkpointing == "mlp" and setting.layers is not None and 0 < setting.layers < 32
    tokens = max(min(job.wanted, int(ENOUGH_KV * limit) // job.all_kv), job.least)
    assert make_plan(job, setting, tokens, limit).peak <= limit
    assert make_plan(job, replace(setting, layers=setting.layers - 1), tokens, limit).peak > limit
    asked = plan(gib, {**model, "gradient_checkpointing": "mlp"})
    assert asked.setting.layers is None, "what the recipe asks for is done in all layers"


def test_room_for_long_contexts_costs_no_smaller_micro_batch_and_no_layers_computed_again() -> None:
    """Lengths without a bound fill the remaining memory; a plan aims at a step as long as the recipe makes it."""
    small = {"episode": {"max_tokens": 256}, "train": {"prompts_per_step": 16, "group_size": 4}}
    recipe = Recipe.model_validate({"task": "slots", **small})
    bounded = Recipe.model_validate({"task": "slots", "model": {"max_context": 1280}, **small})
    shape = shape_of(TINYLLAMA_1B | {"max_position_embeddings": 20480})
    free, tight = (plan_of(MemoryJob(given, shape, 2), 24 * GIB) for given in (recipe, bounded))
    assert free.setting == tight.setting and free.kv_bytes >= 20480 * MemoryJob(recipe, shape, 2).kv


def test_a_warm_start_that_does_not_fit_names_its_own_alternatives() -> None:
    """The message named settings of the later reinforcement learning; a token learned with dropout keeps more."""
    model = {"lora": {"r": 32}, "gradient_checkpointing": "none", "max_context": 32768}

    def job(**changes: Any) -> MemoryJob:
        recipe = made(model | changes, warm_start={})
        return MemoryJob(recipe, SHAPE, 2, phase_config(recipe, WARM_START))

    limit = usable(139 * GIB)
    assert choose(MemoryJob(job().recipe, SHAPE, 2), limit), "what comes after the warm start fits"
    with pytest.raises(UserError, match=r"it fits with model\.gradient_checkpointing=auto, or") as raised:
        plan_of(job(), 139 * GIB)
    assert choose(job(gradient_checkpointing="auto"), limit)
    longest = int(str(raised.value).split("model.max_context=")[1].split()[0])
    assert choose(job(max_context=longest), limit) and not choose(job(max_context=longest + 256), limit)


def test_a_length_that_cannot_fit_is_refused_with_the_longest_that_can() -> None:
    with pytest.raises(UserError, match="sequences of up to 65536 tokens") as raised:
        plan(40, {**LORA, "max_context": 65536})
    longest = int(str(raised.value).split("model.max_context=")[1].split()[0])
    assert f"model.max_context={longest} (the longest that fits)" in str(raised.value)
    assert plan(40, {**LORA, "max_context": longest}).setting.tokens >= longest
    with pytest.raises(UserError, match="does not fit"):
        plan(40, {**LORA, "max_context": longest + 256})


@pytest.mark.parametrize(
    ("more", "longest"),
    [
        ({"episode": {"max_tokens": 40000}}, 41024),
        ({"episode": {"max_tokens": 5000, "max_turns": 8}}, 41024),
        ({"episode": {"max_tokens": 4000}, "futures": {"rounds": 2, "samples": 2}, "credit": "tree"}, 21024),
    ],
    ids=["one reply", "turns", "along the tree"],
)
def test_a_micro_batch_holds_the_longest_sequence_that_the_turns_allow(more: dict[str, Any], longest: int) -> None:
    """It was planned for 8,192 tokens regardless of the turns, and a long episode ran out of memory."""
    assert plan(139, LORA, **more).setting.tokens == longest
    short = changed(SHAPE, context=4096)
    assert plan(139, LORA, shape=short, **more).setting.tokens == 8192, "the model's context ends before"


def test_a_measured_micro_batch_overrides_the_computed_size() -> None:
    def activations(shape: ModelShape, measured: int) -> int:
        found = plan_of(MemoryJob(made(LORA), changed(shape, measured=measured), 2), 139 * GIB)
        assert found.setting.tokens == 8192
        return next(part.learning for part in found.parts if part.name == "activations") // 8192 - 8 * 4096

    other = changed(SHAPE, lean=False)
    assert activations(other, 1_000_000) == 1_000_000 < activations(other, 0)
    assert activations(SHAPE, 4_000_000) == 4_000_000 > activations(SHAPE, 0)
    assert activations(SHAPE, 1_000_000) == activations(SHAPE, 0), "what was compared with a GPU is not undercut"


@pytest.fixture(scope="module")
def live_bytes() -> Callable[[], int]:
    """Counts the bytes of all tensors created from here on that Python holds. Older ones are not searched, which would
    take a fifth of a second each time."""
    gc.collect()
    gc.freeze()
    return count_live_bytes


def count_live_bytes() -> int:
    """Bytes of all tensors that Python holds and the collector sees, each storage once."""
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gc.get_objects() if type(x) is Tensor
    }
    return sum(storages.values())


@pytest.mark.parametrize("rank", [0, 4])
def test_a_micro_batch_is_measured_to_keep_what_the_arithmetic_says(rank: int, live_bytes: Callable[[], int]) -> None:
    config = LlamaConfig(**SIZES, max_position_embeddings=1024)
    module = add_lora(LlamaForCausalLM(config), PolicyConfig(lora=LoraConfig(r=rank, dropout=0.0) if rank else None))
    module.eval()
    job = MemoryJob(made({"lora": {"r": rank, "dropout": 0.0}} if rank else {}), ModelShape(config), 4)
    padded = 3 * 4 * (64 + 2 * 32 + 64)  # without flash attention q, k, v and the result are copied once more
    measured, computed = measure_kept(module, allocated=live_bytes), job.kept + 3 * 4 * 48 + padded
    assert abs(measured / computed - 1) < 0.1 and not module.training
    module.gradient_checkpointing_enable()
    assert measure_kept(module, allocated=live_bytes) == measured and module.is_gradient_checkpointing


@pytest.mark.parametrize("family", ["gemma", "gemma3_text", "phi3", "granite", "qwen2", "qwen3", "smollm3"])
def test_other_families_keep_what_the_arithmetic_says(family: str, live_bytes: Callable[[], int]) -> None:
    config = AutoConfig.for_model(**{"model_type": family, "pad_token_id": 0, "max_position_embeddings": 1024, **SIZES})
    module = AutoModelForCausalLM.from_config(config).eval()
    padded = 3 * 4 * (64 + 2 * 32 + 64)
    computed = MemoryJob(made(), ModelShape(config), 4).kept + 3 * 4 * 48 + padded
    assert measure_kept(module, allocated=live_bytes) == pytest.approx(computed, rel=0.1)


def test_a_micro_batch_of_few_words_is_measured_within_them(live_bytes: Callable[[], int]) -> None:
    few = LlamaConfig(**SIZES | {"vocab_size": 40}, max_position_embeddings=1024)
    assert measure_kept(LlamaForCausalLM(few).eval(), allocated=live_bytes) > 0


def test_less_state_is_planned_for_where_the_recipe_asks_for_it() -> None:
    def optimizer(**train: Any) -> int:
        job = MemoryJob(made(train=train), SHAPE, 2)
        return parts_of(job).get("optimizer", 0)

    assert optimizer() == 12 * SHAPE.parameters
    assert optimizer(optimizer="adamw-8bit") < 6.1 * SHAPE.parameters
    assert optimizer(optimizer={"offload": True}) == 0
    plain, quantized = (MemoryJob(made({**LORA, "quantize": bits}), SHAPE, 2) for bits in ("none", "4bit"))
    assert parts_of(quantized)["weights"] < 6 * GIB
    assert "in place" in {setting.merge for setting in list_settings(plain)}
    assert "in place" not in {setting.merge for setting in list_settings(quantized)}, "4 bits are not merged into"
    assert quantized.kept > 1.5 * plain.kept, "its adapters are called, which keeps more"


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
    job, limit = MemoryJob(made(model, train=train), SHAPE, 2), usable(int(gib * GIB))
    found = choose(job, limit)
    if found is None:
        assert all(make_plan(job, setting, job.least).peak > limit for setting in list_settings(job))
        return
    assert found.peak <= limit and found.kv_bytes >= job.least * job.kv
    assert found.setting.tokens >= max(longest, tokens)
    more = choose(job, limit + 40 * GIB)
    assert more is not None, "what fits into less fits into more"


def test_helpers_share_keys_and_values_with_the_policy() -> None:
    many = {"prompts_per_step": 64, "group_size": 16}
    job = MemoryJob(made(LORA, futures={"name": "classmates", "classmates": ["policy@start"]}, train=many), SHAPE, 2)
    found = choose(job, usable(139 * GIB))
    assert found is not None
    assert found.helper_kv["policy@start"] == found.kv_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path / "model"


def test_a_dry_run_shows_the_plan_for_another_card(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_parts()[1].save_pretrained(folder)  # a dry run looks for tokenizer and weights, too
    (folder / "model.safetensors").touch()
    words = ["train", "quickstart", "--dry-run", f"model.path={folder}", "model.lora={r: 32}", "warm_start=null"]
    assert main([*words, "model.memory_gb=139"]) == 0
    out = capsys.readouterr().out
    for words_of_it in ("merged adapters", "keys and values", "8,030,261,248 parameters", "micro-batch  8192 tokens"):
        assert words_of_it in out
    assert main([*words, "model.memory_gb=12"]) == 2
    assert "does not fit" in capsys.readouterr().err


def test_memory_given_by_number_needs_no_device_of_that_name(folder: Path) -> None:
    found = plan_recipe(made({**LORA, "path": str(folder), "device": "cuda:7", "memory_gb": 139}))
    assert found is not None and found.limit == usable(139 * GIB)


def test_the_table_says_what_was_chosen() -> None:
    said = memory_table(plan(24, LORA))
    assert "each block of the first 29 layers is recomputed" in said and "merged in place" in said
    assert "gives its memory back while the learner works" in said
    assert "host" in said


def test_an_adapters_config_is_taken_from_its_base(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    found = find_config(str(adapter), offline=True)
    assert found is not None and LLAMA_8B.items() <= found.to_dict().items()
    assert find_config("nobody/has-this-model-here", offline=True) is None


def test_ranks_share_the_optimizer_and_the_sums_of_gradients_but_not_the_weights() -> None:
    alone, four = (MemoryJob(made(), SHAPE, 2, processes=n) for n in (1, 4))
    one, shared = parts_of(alone), parts_of(four)
    assert one["weights"] == shared["weights"] and one["optimizer"] == 4 * shared["optimizer"]
    few = [
        MemoryJob(made(train={"token_budget": 256}, model={"max_context": 256}), SHAPE, 2, processes=n) for n in (1, 4)
    ]
    sums = [parts_of(job)["gradients"] + parts_of(job)["activations"] + parts_of(job)["backward"] for job in few]
    arising = sums[1] - SHAPE.parameters - (sums[0] - 4 * SHAPE.parameters)
    assert arising == 4 * 4096 * 128256, "gradients arise whole, and one is summed in float32"
    tiny = parts_of(MemoryJob(made(), changed(SHAPE, parameters=10**9), 2, processes=64))
    assert tiny["optimizer"] == 12 * 4096 * 128256, "a matrix belongs to one rank"
