"""Adapters are part of what the engine runs, wherever they are attached and whatever they contain at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from upshot.core.errors import UserError
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.llama.agreement import busy_adapters
from upshot.engine.llama.driver import BlockDriver
from upshot.engine.llama.select import disagreement
from upshot.engine.llama.shape import shape_of
from upshot.engine.sequence import Rules

peft = pytest.importorskip("peft")
Make = Callable[..., LlamaForCausalLM]
KINDS: dict[str, dict[str, Any]] = {
    "projections": {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["lm_head"]},
    "whole modules": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "norms": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm"]},
    "some tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9, 17]},
    "magnitudes": {"target_modules": ["k_proj", "o_proj"], "use_dora": True},
}


def adapted(model: LlamaForCausalLM, kind: str) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.3, **KINDS[kind]))


def update(model: Any) -> None:
    """What an optimizer does: change values in place."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lean", [True, False])
def test_an_update_of_adapters_reaches_what_is_sampled(make_llama: Make, kind: str, lean: bool) -> None:
    model = adapted(make_llama(), kind).train()
    engine = Engine(model, eos_ids=set(), settings=EngineSettings(lean=lean))
    update(model)
    engine.weights_changed()
    [seq] = engine.submit([5, 9, 17, 33, 60, 7], Rules(max_tokens=5, seed=3))
    engine.run_until_done()
    with torch.no_grad():
        rows = model.eval()(input_ids=torch.tensor([seq.ids])).logits[0].log_softmax(-1)
    own = torch.stack([rows[i - 1, seq.ids[i]] for i in range(6, 11)])
    torch.testing.assert_close(torch.tensor(seq.logprobs), own, atol=2e-4, rtol=1e-4)


class WithoutEmbedding(BlockDriver):
    """A driver that ignores the adapter of the embedding."""

    def logits(self, *args: Any) -> torch.Tensor:
        whole = self.core.embed_tokens
        self.embed = whole.base_layer if hasattr(whole, "base_layer") else whole.original_module
        return super().logits(*args)


@pytest.mark.parametrize("kind", ["embedding", "whole modules"])
def test_the_first_check_finds_an_ignored_adapter_even_if_it_has_no_effect_yet(make_llama: Make, kind: str) -> None:
    model = adapted(make_llama(), kind)
    assert disagreement(model, BlockDriver(model, shape_of(model))) is None
    assert "logits differ" in str(disagreement(model, WithoutEmbedding(model, shape_of(model))))


def test_the_first_check_leaves_adapters_as_they_were(make_llama: Make) -> None:
    model = adapted(make_llama(), "whole modules")
    before = [(w, w.detach().clone(), w._version) for w in model.parameters()]
    with pytest.raises(ZeroDivisionError), busy_adapters(model):
        assert not all(torch.equal(w, values) for w, values, _ in before)
        1 / 0  # noqa: B018
    Engine(model)
    assert all(torch.equal(w, values) and w._version == version for w, values, version in before)


def test_with_a_wrapped_norm_the_slower_driver_is_used(make_llama: Make) -> None:
    engine = Engine(adapted(make_llama(), "norms"))
    assert type(engine.runner.driver).__name__ == "ModuleDriver"
    assert type(Engine(adapted(make_llama(), "head")).runner.driver).__name__ == "BlockDriver"


def test_adapters_that_add_ids_to_the_prompt_are_refused_by_name(make_llama: Make) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UserError, match="PromptTuning"):
        Engine(peft.get_peft_model(make_llama(), config))


def test_lora_adapters_are_part_of_what_the_engine_runs(make_llama: Make) -> None:
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        r=4, lora_alpha=16, lora_dropout=0.3, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(make_llama(), lora)
    model.train()
    engine = Engine(model, eos_ids=set())
    [seq] = engine.submit([5, 6, 7, 8], Rules(max_tokens=12, temperature=0))
    engine.run_until_done()
    model.eval()
    ids = [5, 6, 7, 8]
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert seq.ids == ids
