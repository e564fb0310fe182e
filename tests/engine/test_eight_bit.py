"""Sampling in 8 bits: when it is refused, what depends on the number of rows, and what a frozen model keeps.

The kernels are checked by Triton's interpreter (test_kernels.py, test_cuda_runner.py) and on a GPU (test_gpu.py).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from upshot.config.load import load_recipe, validate_recipe
from upshot.core.errors import UserError
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.llama.agreement import logits_gap, plain_logits
from upshot.engine.llama.driver import BlockDriver
from upshot.engine.llama.eight_bit import (
    Joined8,
    Linear8,
    check_eight_bit_cache,
    check_eight_bits,
    check_projections,
    narrow_projections,
)
from upshot.engine.llama.linear import neighbours
from upshot.engine.llama.select import disagreement, drive_on_cpu
from upshot.engine.llama.shape import shape_of

Make = Callable[..., LlamaForCausalLM]


def test_a_device_without_8_bit_products_is_refused_with_an_alternative(make_llama: Make) -> None:
    with pytest.raises(UserError, match=r"weights: fp8 .*needs a GPU.*not cpu; leave it out"):
        Engine(make_llama(), eos_ids=set(), settings=EngineSettings(kv_bytes=1 << 20, weights="fp8"))


@pytest.mark.parametrize(
    ("capability", "dtype", "family", "exact", "says"),
    [
        ((8, 0), torch.bfloat16, "Llama", False, r"needs Hopper or later .*A card has 8.0"),
        ((9, 0), torch.float16, "Llama", False, "needs a model in bfloat16, this one is in torch.float16"),
        ((9, 0), torch.bfloat16, "Gemma2", False, "was tested with Llama, .* and the fused block, not Gemma2; leave"),
        ((9, 0), torch.bfloat16, "Llama", True, "exact log-probabilities cannot be combined"),
        ((9, 0), torch.bfloat16, "Llama", False, ""),
    ],
)
def test_what_cannot_be_sampled_in_8_bits_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: Any, family: str, exact: bool, says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    shape = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype)
    settings = EngineSettings(weights="fp8", exact=exact)
    if not says:
        check_eight_bits(family, shape, settings, fused=True)
        return
    with pytest.raises(UserError, match=says):
        check_eight_bits(family, shape, settings, fused=True)


def test_projections_that_cannot_be_quantized_are_refused() -> None:
    with pytest.raises(UserError, match="multiples of 16, not 24 to 32"):
        check_projections([torch.nn.Linear(24, 32)])
    with pytest.raises(UserError, match="adapters that can be merged, not Bilinear"):
        check_projections([torch.nn.Bilinear(16, 16, 16)])


def test_a_frozen_model_keeps_half_the_bytes_and_nearly_the_same_logits(make_llama: Make) -> None:
    model = make_llama(hidden_size=128, intermediate_size=256, initializer_range=0.05).to(torch.bfloat16)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = model(input_ids=ids).logits.float()
        projections = sum(w.nbytes for n, w in model.named_parameters() if "_proj" in n)
        narrow_projections(model)
        after = model(input_ids=ids).logits.float()
    now = sum(w.nbytes for n, w in model.named_parameters() if "_proj" in n)
    assert projections / 2 < now < 0.55 * projections
    assert not any(w.requires_grad for n, w in model.named_parameters() if "_proj" in n)
    assert 0 < float((after - before).norm() / before.norm()) < 0.1
    # After a swap to the host and back, weights and scales of one input are still adjacent.
    names = {id(w): n for n, w in model.named_parameters()}
    first = "model.layers.0.self_attn."
    groups = [[names[id(w)] for w in group] for group in neighbours(model)]
    assert [first + f"{name}_proj.scale" for name in "qkv"] in groups
    assert [first + f"{name}_proj.weight" for name in "qkv"] in groups


def noisy_driver(model: LlamaForCausalLM, noise: float, narrow: bool = True) -> BlockDriver:
    """A driver whose products are off by this much, as they are in 8 bits."""
    driver = BlockDriver(model, shape_of(model))
    driver.narrow = driver.rough = narrow
    product, draw = driver.project_out, torch.Generator().manual_seed(0)

    def back(module: Any, x: Any) -> torch.Tensor:
        y = product(module, x)
        return y + noise * y.abs().mean() * torch.randn(y.shape, generator=draw).to(y.dtype)

    driver.project_out = back  # type: ignore[method-assign]
    return driver


def test_a_driver_in_8_bits_is_checked_block_by_block_because_noise_grows_with_depth(make_llama: Make) -> None:
    model = make_llama(num_hidden_layers=24, initializer_range=1.0)
    blocks, driver = model.model.layers, noisy_driver(model, 0.05)
    ids = [(7 * i + 3) % model.config.vocab_size for i in range(12)]
    with torch.inference_mode():
        whole = drive_on_cpu(driver, ids)
        assert logits_gap(whole, plain_logits(model, torch.tensor(ids)), torch.float32, rough=True) is not None
    assert disagreement(model, driver) is None
    assert model.model.layers is blocks and len(driver.layers) == 24
    driver.layers[5].down = driver.layers[6].down
    assert "block 5: logits differ" in (disagreement(model, driver) or "")
    assert model.model.layers is blocks and len(driver.layers) == 24


def test_in_16_bits_blocks_decide_if_rounding_changes_the_whole(make_llama: Make) -> None:
    for dtype, agrees in ((torch.bfloat16, True), (torch.float32, False)):
        model = make_llama(num_hidden_layers=24, initializer_range=1.0).to(dtype)
        driver = noisy_driver(model, 0.05, narrow=False)
        assert (disagreement(model, driver) is None) is agrees
    model = make_llama(num_hidden_layers=24, initializer_range=1.0).to(torch.bfloat16)
    driver = noisy_driver(model, 0.05, narrow=False)
    driver.layers[5].down = driver.layers[6].down
    assert "block 5: logits differ" in (disagreement(model, driver) or "")


def test_keys_and_values_in_8_bits_are_refused_if_no_kernel_stores_them(make_llama: Make) -> None:
    with pytest.raises(UserError, match=r"kv: fp8 .*needs a GPU and a family that the fused block serves"):
        Engine(make_llama(), eos_ids=set(), settings=EngineSettings(kv_bytes=1 << 20, kv="fp8"))


@pytest.mark.parametrize("adapted", [False, True])
def test_keys_with_large_biases_are_refused_in_8_bits_because_of_rounding(make_llama: Make, adapted: bool) -> None:
    model: Any = make_llama(attention_bias=True)
    bias = model.model.layers[1].self_attn.k_proj.bias
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["k_proj"]))
    settings = EngineSettings(kv_bytes=1 << 20, kv="fp8", kernels=True)
    with torch.no_grad():
        bias[3] = -5.0
    check_eight_bit_cache(model, shape_of(model), settings, fused=True)
    with torch.no_grad():
        bias[3] = -60.0
    with pytest.raises(UserError, match=r"kv: fp8 .* which have biases of up to 60 \(at most 10\); set kv: model"):
        check_eight_bit_cache(model, shape_of(model), settings, fused=True)


def test_frozen_projections_keep_the_addresses_that_captured_steps_read() -> None:
    joined = Joined8([Linear8(torch.nn.Linear(16, 16), torch.ones(1)) for _ in range(3)], torch.float32)
    places = [(x.data_ptr(), x.clone()) for x in (joined.weight.view(torch.uint8), joined.scale, joined.bias)]
    joined.refresh()
    for (place, values), x in zip(places, (joined.weight.view(torch.uint8), joined.scale, joined.bias), strict=True):
        assert x.data_ptr() == place and torch.equal(x, values)


def test_a_row_of_zeros_stays_zero() -> None:
    linear = torch.nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        linear.weight[3] = 0
    block = torch.nn.ModuleDict({"o_proj": linear})
    narrow_projections(block)
    found = block["o_proj"](torch.ones(1, 16))
    assert float(found[0, 3]) == 0.0 and bool(found.isfinite().all())


@pytest.mark.parametrize(
    ("rows", "n", "width", "parts", "expected"),
    [
        (1, 6144, 4096, False, (16, 64, 256, 1)),
        (8, 4096, 4096, True, (16, 64, 256, 4)),
        (8, 4096, 14336, True, (16, 64, 256, 4)),
        (32, 28672, 4096, False, (32, 64, 256, 1)),
        (48, 4096, 4096, True, None),
        (512, 4096, 14336, True, None),
        (8, 576, 576, True, (16, 64, 256, 1)),
    ],
)
def test_tiles_are_those_that_measured_best_on_132_multiprocessors(
    rows: int, n: int, width: int, parts: bool, expected: tuple[int, ...] | None
) -> None:
    pytest.importorskip("triton")
    from upshot.engine.kernels.fp8 import tile_for

    found = tile_for(rows, n, width, 132, parts)
    assert (found and (found.rows, found.cols, found.depth, found.parts)) == expected


def test_in_8_bits_importance_weights_are_on_unless_the_recipe_turns_them_off() -> None:
    def rule(*words: str) -> str:
        return load_recipe("quickstart", list(words)).recipe.train.importance.rule

    assert rule("model.engine.weights=fp8") == "truncate"
    assert rule("model.engine.weights=fp8", "train.importance.high=3") == "truncate"
    assert rule("model.engine.weights=fp8", "train.importance=none") == "none"
    assert rule("model.engine.kv=fp8") == "truncate"
    assert rule() == "none"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"engine": {"weights": "fp8"}, "exact": True}, "log-probabilities computed in 8 bits differ"),
        (
            {"engine": {"name": "vllm", "weights": "fp8"}},
            r"weights applies only to the engine upshot; for vLLM set arguments",
        ),
        ({"engine": {"kv": "fp8"}, "exact": True}, "log-probabilities computed in 8 bits differ"),
        ({"engine": {"name": "vllm", "kv": "fp8"}}, r"kv applies only to the engine upshot; for vLLM set arguments"),
    ],
)
def test_settings_that_exclude_8_bits_are_refused_in_a_recipe(model: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        validate_recipe({"task": {"name": "slots"}, "model": model})


def test_only_models_in_this_process_take_weights_in_8_bits() -> None:
    helper = {"model": "scripted:echo", "weights": "fp8"}
    with pytest.raises(UserError, match="the option 'weights' has no effect on 'scripted:echo'"):
        validate_recipe({"task": {"name": "slots"}, "models": {"user": helper}})
