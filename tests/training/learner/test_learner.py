"""The learner: micro-batches change nothing, master weights keep small steps, dropout, references, checkpoints."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tests.tiny import shared_tokenizer
from tests.training.workshop import datum, learner
from upshot.config.recipe import LoraConfig, PolicyConfig, TrainConfig
from upshot.config.recipe.train import OptimizerConfig
from upshot.training.adapters import add_lora
from upshot.training.learner.forward.padded import token_logprobs
from upshot.training.learner.forward.select import forward_of
from upshot.training.learner.learner import Learner, learning_rate
from upshot.training.learner.optim.adamw import MasterAdamW
from upshot.training.loops.dpo import Dpo
from upshot.training.loops.ppo import Ppo
from upshot.training.loops.sft import Sft
from upshot.training.objectives.objectives import Objective, PolicyGradient

LENGTHS = (5, 9, 6, 14, 8, 7)


def gradient(own: Learner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in own.parameters if p.grad is not None])


@pytest.mark.parametrize("norm", ["sequence", "token", "constant"])
@pytest.mark.parametrize("kind", ["sft", "rl", "ppo", "dpo"])
def test_the_gradient_does_not_depend_on_the_token_budget(kind: str, norm: str) -> None:
    found = []
    for budget in (1, 30, 10_000):
        own = learner(value_head=kind == "ppo", token_budget=budget, length_norm=norm, kl=0.1)
        if own.value_head is not None:
            torch.nn.init.constant_(own.value_head.weight, 0.1)
        config = own.config
        objective: Objective = {"sft": Sft(), "rl": PolicyGradient(config), "ppo": Ppo(config), "dpo": Dpo(config)}[
            kind
        ]
        data = [datum(length, seed) for seed, length in enumerate(LENGTHS)]
        units = [data[i : i + 2] for i in range(0, 6, 2)] if kind == "dpo" else [[d] for d in data]
        logs = own.forward_backward(units, objective)
        found.append((gradient(own), logs))
    for other, logs in found[1:]:
        assert torch.allclose(found[0][0], other, atol=1e-6), "the same gradient however the step is split"
        assert logs == pytest.approx(found[0][1], abs=1e-5), "and the same log"


def test_bf16_weights_take_steps_that_bf16_cannot_hold() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], lr=1e-4, config=OptimizerConfig())
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step(1e-4)
        optimizer.zero_grad()
    assert optimizer.masters[0].dtype == torch.float32
    assert float(optimizer.masters[0].detach().mean()) == pytest.approx(0.99, abs=1e-4)
    assert float(weight.detach().float().mean()) == pytest.approx(0.99, abs=4e-3), "alone, 1 - 0.0001 rounds back to 1"
    saved = optimizer.state_dict()
    twin = MasterAdamW([torch.nn.Parameter(weight.detach().clone())], lr=1e-4, config=OptimizerConfig())
    twin.load_state_dict(saved)
    assert torch.equal(twin.masters[0], optimizer.masters[0]), "masters are restored, not rounded"


def test_learning_reduces_the_loss() -> None:
    own = learner(lr=0.01)
    data = [[datum(8, seed)] for seed in range(4)]
    losses = []
    for _ in range(15):
        losses.append(own.forward_backward(data, Sft())["loss/nll"])
        own.step()
    assert losses[-1] < 0.5 * losses[0]


def test_the_gradient_is_clipped_and_a_step_that_is_not_finite_is_skipped() -> None:
    own = learner(lr=0.01, optimizer={"grad_clip": 0.5})
    before = [p.detach().clone() for p in own.parameters]
    own.forward_backward([[datum(8, 0)]], Sft())
    own.parameters[0].grad = torch.full_like(own.parameters[0], math.nan)
    logs = own.step()
    assert logs["train/skipped"] == 1 and own.steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, own.parameters, strict=True))
    own.forward_backward([[datum(8, 0)]], Sft())
    assert own.step()["train/skipped"] == 0
    assert not torch.equal(before[0], own.parameters[0])


def test_the_schedule_warms_up_and_falls() -> None:
    config = TrainConfig(lr=1.0, schedule={"warmup_steps": 4, "name": "cosine", "min_lr": 0.1}, steps=12)
    rates = [learning_rate(config, step) for step in range(13)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0]) and rates[4] == 1.0
    assert rates[8] == pytest.approx(0.1 + 0.9 * 0.5) and rates[12] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[3:]))


def test_the_reference_does_not_change_while_the_policy_learns() -> None:
    own = learner(lr=0.05)
    data = [datum(8, 0), datum(6, 1)]
    before = own.logprobs(data)
    own.keep_reference()
    own.forward_backward([[d] for d in data], Sft())
    own.step()
    assert own.logprobs(data, reference=True) == before
    assert own.logprobs(data) != before
    twice = own.logprobs([data[0], data[1], data[0]])
    assert twice[0] == twice[2] != [], "the same datum twice in a batch"


def lora_learner(**config: object) -> Learner:
    own = learner(**config)
    torch.manual_seed(1)
    module = add_lora(own.module, PolicyConfig(lora=LoraConfig(r=2, dropout=0.5)))
    return Learner(module, own.tokenizer, TrainConfig.model_validate(config))


def test_with_new_adapters_the_reference_is_the_model_without_them() -> None:
    own = lora_learner(lr=0.05)
    data = [datum(8, 0)]
    before = own.logprobs(data)
    own.keep_reference()
    for _ in range(2):
        own.forward_backward([data], Sft())
        own.step()
    assert own.logprobs(data, reference=True)[0] == pytest.approx(before[0], abs=1e-6)
    assert own.logprobs(data)[0] != pytest.approx(before[0], abs=1e-3)
    trained = sum(p.numel() for p in own.parameters)
    assert trained < 0.5 * sum(p.numel() for p in own.module.parameters()), "only adapters are trained"


def test_dropout_is_on_for_imitation_and_off_if_ratios_are_compared() -> None:
    own = lora_learner(lr=0.05)
    data = [datum(8, 0)]
    for _ in range(2):  # adapters start at zero, where dropout has no effect
        own.forward_backward([data], Sft())
        own.step()
    noisy = {own.forward_backward([data], Sft())["loss/nll"] for _ in range(4)}
    assert len(noisy) > 1
    data[0].old = own.logprobs(data)[0]
    logs = own.forward_backward([data], PolicyGradient(own.config))
    assert logs["policy/ratio"] == pytest.approx(1, abs=1e-5)
    assert own.logprobs(data) == own.logprobs(data)


def gpt2(**config: Any) -> Learner:
    """A model whose attention applies its dropout itself, not in a layer."""
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5)
    assert shape.attn_pdrop > 0
    return Learner(GPT2LMHeadModel(shape), shared_tokenizer(), TrainConfig.model_validate(config))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_has_no_dropout_if_ratios_are_compared(checkpointing: bool) -> None:
    own = gpt2()
    if checkpointing:
        own.module.gradient_checkpointing_enable()
    data = [datum(12, 0)]
    data[0].old = own.logprobs(data)[0]
    found = []
    for _ in range(2):
        logs = own.forward_backward([data], PolicyGradient(own.config))
        assert logs["policy/kl_to_sampler"] == pytest.approx(0, abs=1e-9)
        found.append(gradient(own))
        own.optimizer.zero_grad()
    assert torch.equal(*found)
    noisy = {own.forward_backward([data], Sft())["loss/nll"] for _ in range(4)}
    assert len(noisy) > 1, "imitation keeps the model's dropout"


def test_layers_are_still_checkpointed_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [datum(12, 0)]
    plain, saving = gpt2(), gpt2()
    saving.module.gradient_checkpointing_enable()
    calls = []
    for layer in saving.module.transformer.h:
        inner = layer._gradient_checkpointing_func
        monkeypatch.setattr(layer, "_gradient_checkpointing_func", lambda *a, f=inner: (calls.append(1), f(*a))[1])
    for own in (plain, saving):
        own.forward_backward([data], PolicyGradient(own.config))
    assert len(calls) == 2, "one call a layer"
    assert torch.allclose(gradient(plain), gradient(saving), atol=1e-6)
    assert not any(layer.training for layer in saving.module.modules()), "each has its own mode back"


def test_micro_batches_of_a_bf16_model_add_up_in_float32() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], lr=1.0, config=OptimizerConfig())
    for part in (256.0, *[0.5] * 64):  # in bfloat16, 256 + 0.5 is 256
        (weight * part).sum().backward()
        optimizer.gather()
    assert optimizer.masters[0].grad is not None
    assert optimizer.masters[0].grad.tolist() == [288.0, 288.0]


def test_a_bf16_learner_clips_the_float32_sum() -> None:
    base = learner()
    own = Learner(
        base.module.to(torch.bfloat16), base.tokenizer, TrainConfig(token_budget=1, optimizer={"grad_clip": 1e-3})
    )
    own.forward_backward([[datum(8, seed)] for seed in range(3)], Sft())
    assert all(p.grad is None for p in own.parameters), "what is kept is the sum"
    assert own.step()["train/grad_norm"] > 0
    assert all(m.grad is None for m in own.optimizer.masters)


def test_values_are_read_one_position_before_their_token() -> None:
    own = learner(value_head=True)
    assert own.value_head is not None
    torch.nn.init.normal_(own.value_head.weight)
    data = [datum(9, 0), datum(5, 1)]
    changed = datum(9, 0)
    changed.ids[6] = 8 if changed.ids[6] != 8 else 9
    first, _, second = own.values([*data, changed])
    assert first[:7] == pytest.approx(second[:7], abs=1e-5), "what a token is worth is said before it is seen"
    assert first[7] != pytest.approx(second[7], abs=1e-5)


def test_a_checkpoint_is_a_hugging_face_folder(tmp_path: Path) -> None:
    own = learner(lr=0.01, value_head=True)
    own.forward_backward([[datum(8, 0)]], Sft())
    own.step()
    own.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([datum(8, 0).ids])
    with torch.no_grad():
        assert torch.equal(token_logprobs(loaded(ids).logits, ids), token_logprobs(own.module(ids).logits, ids))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    talk = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == own.tokenizer.apply_chat_template(
        talk, tokenize=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_do_not_change_training(dtype: torch.dtype, tmp_path: Path) -> None:
    def new() -> Learner:
        made = learner(lr=0.01, schedule={"name": "cosine", "warmup_steps": 2}, steps=6)
        made.module.save_pretrained(tmp_path / "new")  # loaded as a run loads it; .to(dtype) would round buffers, too
        module = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=dtype)
        return Learner(module, made.tokenizer, made.config, value_head=True)

    def step(own: Learner, number: int) -> dict[str, float]:
        logs = own.forward_backward([[datum(8, number)], [datum(6, number + 50)]], Ppo(own.config))
        return logs | own.step()

    straight = new()
    expected = [step(straight, number) for number in range(6)]
    first = new()
    found = [step(first, number) for number in range(3)]
    first.save(tmp_path)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    second = Learner(module, first.tokenizer, first.config, value_head=True)
    second.load(tmp_path)
    found += [step(second, number) for number in range(3, 6)]
    assert found == expected
    for a, b in zip(straight.parameters, second.parameters, strict=True):
        assert torch.equal(a, b)


def test_a_resumed_learner_reads_with_the_forward_that_the_run_began_with(tmp_path: Path) -> None:
    """Rounding decides where two are close, and the weights of a checkpoint are not those of the beginning."""
    began, resumed = learner(), learner()
    began.forward = forward_of(began.module, chosen="transformers")
    assert (began.forward.name, resumed.forward.name) == ("transformers", "lean")
    began.save(tmp_path)
    resumed.load(tmp_path)
    assert resumed.forward.name == "transformers"


def test_a_warm_up_below_one_is_a_share_of_all_updates() -> None:
    share = TrainConfig(steps=20, lr=1.0, schedule={"name": "cosine", "warmup_steps": 0.1})
    steps = TrainConfig(steps=20, lr=1.0, schedule={"name": "cosine", "warmup_steps": 2})
    assert [learning_rate(share, n) for n in range(20)] == [learning_rate(steps, n) for n in range(20)]
    assert learning_rate(share, 0) == 0.5


def test_a_warm_up_of_a_broken_number_of_updates_never_exceeds_the_learning_rate() -> None:
    config = TrainConfig(steps=20, lr=1.0, schedule={"warmup_steps": 1.5})
    assert [learning_rate(config, n) for n in range(3)] == [0.5, 1.0, 1.0]


def test_gradients_never_come_from_the_attention_that_pytorch_prefers_on_hopper() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    learner()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
