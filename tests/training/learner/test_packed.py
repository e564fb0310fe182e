"""The packed forward gives the padded one's loss and gradient of every weight, with and without shared beginnings."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tests.tiny import shared_tokenizer
from tests.training.workshop import learner
from upshot.config.recipe import LoraConfig, PolicyConfig, TrainConfig
from upshot.training.adapters import add_lora
from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch, pack
from upshot.training.learner.forward.packed import PackedForward
from upshot.training.learner.forward.padded import PaddedForward
from upshot.training.learner.forward.select import forward_of
from upshot.training.learner.learner import Learner
from upshot.training.loops.dpo import Dpo
from upshot.training.loops.ppo import Ppo
from upshot.training.loops.sft import Sft
from upshot.training.objectives.objectives import Objective, PolicyGradient

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
ragged = st.lists(st.integers(1, 24), min_size=2, max_size=7)
kinds = st.sampled_from(["sft", "rl", "ppo", "dpo", "entropy"])


def windowed(window: int | None = 7) -> Any:
    """A small model with grouped heads, whose layers see `window` tokens."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=window))


def groups(lengths: list[int], prompt: int, seed: int) -> list[Datum]:
    """Replies to two prompts, with trained turns and turns of others in between."""
    rng = random.Random(seed)
    starts = [[rng.randrange(1, 61) for _ in range(prompt)] for _ in range(2)]
    data = []
    for i, length in enumerate(lengths):
        ids = [*starts[i % 2], *[rng.randrange(1, 61) for _ in range(length)]]
        turn = rng.randint(1, 6)
        mask = [0] * prompt + [int(at // turn % 2 == 0) for at in range(length)]
        noise = [[rng.gauss(0, 1) for _ in ids] for _ in range(4)]
        old = [-4 + 0.1 * x for x in noise[0]]
        data.append(Datum(ids, mask, old, noise[1], [x - 0.1 for x in old], noise[3], noise[2]))
    return data


def objective(kind: str, config: TrainConfig) -> Objective:
    if kind == "sft":
        return Sft()
    made = {"rl": PolicyGradient, "ppo": Ppo, "dpo": Dpo, "entropy": PolicyGradient}[kind]
    return made(config)


def gradients(
    module: Any, data: list[Datum], kind: str, padded: bool = False, shares: bool = True, budget: int = 4096
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The metrics of one forward_backward, and the gradient of every weight, including the value head."""
    torch.manual_seed(1)
    config = TrainConfig(token_budget=budget, kl=0.1, entropy=0.3 if kind == "entropy" else 0.0)
    own = Learner(module, shared_tokenizer(), config, 8, 0.8, value_head=kind == "ppo")
    if own.value_head is not None:
        torch.nn.init.normal_(own.value_head.weight)
    assert isinstance(own.forward, PackedForward)
    own.forward.shares = shares
    if padded:
        own.forward = PaddedForward(module)
    data = data[: len(data) // 2 * 2] if kind == "dpo" else data
    units = [data[i : i + 2] for i in range(0, len(data), 2)] if kind == "dpo" else [[d] for d in data]
    logs = own.forward_backward(units, objective(kind, own.config))
    found = {str(i): p.grad.clone() for i, p in enumerate(own.parameters) if p.grad is not None}
    own.optimizer.zero_grad()
    return logs, found


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == pytest.approx(other[0], abs=2e-4, rel=1e-4)
    assert one[1].keys() == other[1].keys()
    largest = max(float(grad.abs().max()) for grad in other[1].values())
    for name, grad in other[1].items():
        assert torch.allclose(one[1][name], grad, atol=2e-5 * max(largest, 1), rtol=1e-4), name


@settings(max_examples=12, deadline=None)
@given(ragged, st.integers(1, 40), st.sampled_from([None, 5, 19]), kinds, st.integers(0, 99))
def test_packed_and_shared_gradients_are_those_of_padded_sequences(
    lengths: list[int], prompt: int, window: int | None, kind: str, seed: int
) -> None:
    data = groups(lengths, prompt, seed)
    module = windowed(window)
    expected = gradients(module, data, kind, padded=True)
    for shares in (False, True):
        assert_same(gradients(module, data, kind, shares=shares), expected)


@settings(max_examples=8, deadline=None)
@given(ragged, kinds, st.integers(1, 300), st.randoms(use_true_random=False))
def test_order_and_micro_batches_change_nothing(lengths: list[int], kind: str, budget: int, rng: random.Random) -> None:
    module = windowed()
    data = groups(lengths, 33, 0)
    expected = gradients(module, data, kind)
    units = [data[i : i + 2] for i in range(0, len(data) // 2 * 2, 2)] if kind == "dpo" else [[d] for d in data]
    rng.shuffle(units)
    assert_same(gradients(module, [d for unit in units for d in unit], kind, budget=budget), expected)


def test_replies_of_one_token_and_a_sequence_longer_than_the_budget() -> None:
    module = windowed()
    data = [*groups([1, 1, 1], 20, 0), *groups([70], 20, 1)]
    expected = gradients(module, data, "rl", padded=True)
    assert_same(gradients(module, data, "rl", budget=30), expected)
    assert_same(gradients(module, data, "rl", shares=False, budget=1), expected)


def test_duplicate_sequences_and_prefixes_of_others_are_learned() -> None:
    module = windowed(None)
    (whole,) = groups([44], 20, 0)
    part = Datum(*(getattr(whole, name)[:48] for name in ("ids", "mask", "old", "advantages", "reference")))
    data = [whole, part, copy.copy(whole)]
    batch = pack(data, "cpu", share=True)
    assert len(batch.ids) == 64, "the whole one, and nothing else"
    expected = gradients(module, data, "rl", padded=True)
    assert_same(gradients(module, data, "rl"), expected)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["lm_head", "v_proj"]])
def test_adapters_get_the_same_gradients_those_on_the_head_too(targets: list[str], checkpointing: bool) -> None:
    torch.manual_seed(2)
    module = add_lora(windowed(), PolicyConfig(lora=LoraConfig(r=2, targets=targets)))
    for weight in module.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.3)
    data = groups([5, 9, 7], 33, 0)
    expected = gradients(module, data, "entropy", padded=True)
    if checkpointing:
        module.gradient_checkpointing_enable()
    assert_same(gradients(module, data, "entropy"), expected)


def test_a_model_with_soft_caps_is_read_packed() -> None:
    torch.manual_seed(0)
    module = Gemma2ForCausalLM(
        Gemma2Config(
            **SMALL, head_dim=4, sliding_window=9, attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
            attn_implementation="eager", query_pre_attn_scalar=4,
        )
    )  # fmt: skip
    data = groups([5, 9, 7, 12], 33, 0)
    expected = gradients(module, data, "entropy", padded=True)
    for shares in (False, True):
        assert_same(gradients(module, data, "entropy", shares=shares), expected)


def test_a_model_that_changes_its_logits_is_read_padded_with_a_note() -> None:
    torch.manual_seed(0)
    module = CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25))
    with pytest.warns(UserWarning, match="falls back to a slower forward: transformers: logits differ"):
        assert isinstance(forward_of(module), PaddedForward)


def test_with_dropout_no_beginning_is_shared() -> None:
    own = learner()
    seen: list[bool] = []
    read = own.forward.read

    def watched(batch: TrainBatch, *args: Any, **more: Any) -> ForwardOutput:
        seen.append(batch.layout.shares)
        return read(batch, *args, **more)

    own.forward.read = watched  # type: ignore[method-assign, assignment]
    data = [[datum] for datum in groups([3, 3, 3, 3], 32, 0)]
    for datum in data:
        datum[0].ids = [i % 40 for i in datum[0].ids]
    own.forward_backward(data, Sft())
    own.forward_backward(data, PolicyGradient(own.config))
    own.logprobs([datum[0] for datum in data])
    assert seen == [False, True, True]
