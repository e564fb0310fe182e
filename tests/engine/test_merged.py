"""Merged adapters: the plain fast path, merged in float32 and rounded once, without changing the model's weights."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.engine.test_adapters import update
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.exact.step import ExactDriver
from upshot.engine.llama.driver import BlockDriver
from upshot.engine.llama.lora import is_plain
from upshot.engine.llama.merged import MergedWeight
from upshot.engine.sequence import Rules

peft = pytest.importorskip("peft")
Make = Callable[..., LlamaForCausalLM]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": SEVEN},
    "some projections": {"target_modules": ["v_proj", "up_proj"]},
    "rslora": {"target_modules": SEVEN, "use_rslora": True},
    "dora": {"target_modules": SEVEN, "use_dora": True},
    "embedding and head": {"target_modules": [*SEVEN, "embed_tokens", "lm_head"]},
    "whole modules": {"target_modules": SEVEN, "modules_to_save": ["embed_tokens", "lm_head"]},
}


def adapted(model: LlamaForCausalLM, kind: str = "lora") -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **KINDS[kind]))


def made(model: Any, **settings: Any) -> Engine:
    return Engine(model, eos_ids=set(), settings=EngineSettings(kv_bytes=1 << 20, **settings))


def driver_of(engine: Engine) -> BlockDriver:
    driver = engine.runner.driver
    assert isinstance(driver, BlockDriver)
    return driver


def sampled(engine: Engine) -> tuple[list[int], torch.Tensor]:
    [seq] = engine.submit([5, 9, 17, 33, 60, 7], Rules(max_tokens=8, seed=3))
    engine.run_until_done()
    return seq.ids, torch.tensor(seq.logprobs)


def scored(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        rows = model.eval()(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return torch.stack([rows[i - 1, ids[i]] for i in range(6, len(ids))])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_uses_the_plain_weights_path(make_llama: Make, kind: str) -> None:
    model = adapted(make_llama(), kind)
    engine = made(model)
    driver = driver_of(engine)
    assert is_plain(driver.embed) and is_plain(driver.head)
    for layer in driver.layers:
        assert layer.qkv.joined is not None and layer.gate_up.joined is not None
        assert is_plain(layer.o) and is_plain(layer.down)
    for _ in range(2):
        update(model)
        engine.weights_changed()
        ids, logprobs = sampled(engine)
        torch.testing.assert_close(logprobs, scored(model, ids), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_merged_weight_is_the_float32_one_rounded_once(make_llama: Make, kind: str) -> None:
    model = adapted(make_llama().to(torch.bfloat16), kind)
    for name, weight in model.named_parameters():
        if "lora" in name:
            assert weight.dtype == torch.float32, "peft keeps adapters in float32 over a bfloat16 base"
    update(model)
    down = model.get_base_model().model.layers[0].mlp.down_proj
    merged = MergedWeight([down], torch.bfloat16)
    whole = (
        down.base_layer.weight.double()
        + 2.0 * down.lora_B["default"].weight.double() @ down.lora_A["default"].weight.double()
    )
    if kind == "dora":
        whole *= (down.lora_magnitude_vector["default"].weight.double() / whole.norm(dim=1))[:, None]
    wrong = (merged.weight != whole.to(torch.bfloat16)).float().mean()
    assert wrong < 1e-3, "but for ties that float32 sees on the other side"


def test_neither_merging_nor_sampling_touches_the_model(make_llama: Make) -> None:
    model = adapted(make_llama(), "embedding and head")
    update(model)
    before = {name: (w, w.detach().clone(), w._version) for name, w in model.named_parameters()}
    engine = made(model)
    sampled(engine)
    engine.weights_changed()
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, (weight, values, version) in before.items():
        assert after[name] is weight and torch.equal(weight, values) and weight._version == version


def test_without_merging_adapters_are_called_and_nothing_is_copied(make_llama: Make) -> None:
    model = adapted(make_llama())
    update(model)
    engine = made(model, merge="never")
    driver = driver_of(engine)
    assert not any(isinstance(held, MergedWeight) for held in driver.weights.held)
    assert driver.layers[0].o is model.get_base_model().model.layers[0].self_attn.o_proj
    ids, logprobs = sampled(engine)
    torch.testing.assert_close(logprobs, scored(model, ids), atol=2e-4, rtol=1e-4)


def test_a_frozen_copy_shares_the_base_until_its_adapters_add_something(make_llama: Make) -> None:
    policy = adapted(make_llama())
    base = {id(p): p for p in policy.parameters() if not p.requires_grad}
    frozen = copy.deepcopy(policy, dict(base)).eval().requires_grad_(False)
    engine, twin = made(policy), made(frozen)
    start = scored(frozen, sampled(twin)[0])
    assert not any(isinstance(held, MergedWeight) for held in driver_of(twin).weights.held)
    base_of = policy.get_base_model().model.layers[0].mlp.down_proj.base_layer.weight
    assert driver_of(twin).layers[0].down.weight.data_ptr() == base_of.data_ptr()
    update(policy)
    engine.weights_changed()
    twin.weights_changed()
    torch.testing.assert_close(sampled(twin)[1], start, atol=2e-4, rtol=1e-4)
    update(frozen.requires_grad_(True))
    frozen.requires_grad_(False)
    twin.weights_changed()
    assert any(isinstance(held, MergedWeight) for held in driver_of(twin).weights.held)


def test_exact_mode_never_merges(make_llama: Make) -> None:
    engine = made(adapted(make_llama()), exact=True)
    assert isinstance(engine.runner.driver, ExactDriver)


def test_adapters_are_merged_without_triton(make_llama: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU may lack it; only weights in 8 bits need its kernels."""
    monkeypatch.setitem(sys.modules, "upshot.engine.kernels.fp8", None)  # importing it fails
    engine = made(adapted(make_llama()))
    assert driver_of(engine).weights.held
    engine.weights_changed()
    assert len(sampled(engine)[0]) > 6


def test_disabled_adapters_are_off_in_the_sampler_after_the_next_change(make_llama: Make) -> None:
    model = adapted(make_llama())
    update(model)
    engine = made(model)
    with model.disable_adapter():
        engine.weights_changed()
        ids, logprobs = sampled(engine)
        torch.testing.assert_close(logprobs, scored(model, ids), atol=2e-4, rtol=1e-4)
    engine.weights_changed()
    ids, logprobs = sampled(engine)
    torch.testing.assert_close(logprobs, scored(model, ids), atol=2e-4, rtol=1e-4)
