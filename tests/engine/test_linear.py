"""Joined projections: the same parameters, backed by one tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from upshot.engine.llama.linear import JoinedProjections, Projections


def join_all(model: LlamaForCausalLM) -> list[JoinedProjections]:
    joined = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        joined.append(Projections([attention.q_proj, attention.k_proj, attention.v_proj]).joined)
        joined.append(Projections([mlp.gate_proj, mlp.up_proj]).joined)
    assert all(joined)
    return joined


def test_joining_changes_no_value_and_the_learner_writes_into_it(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = make_llama()
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model(input_ids=ids).logits
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    joined = join_all(model)
    torch.testing.assert_close(model(input_ids=ids).logits, before, atol=0, rtol=0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    first = model.model.layers[0].self_attn
    assert torch.equal(joined[0].weight, torch.cat([first.q_proj.weight, first.k_proj.weight, first.v_proj.weight]))


def test_joined_models_are_saved_and_read_back(make_llama: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    model = make_llama()
    join_all(model)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_parameter_given_other_storage_is_taken_back_in(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = make_llama()
    joined = join_all(model)[0]
    k_proj = model.model.layers[0].self_attn.k_proj
    k_proj.weight.data = torch.full_like(k_proj.weight.data, 3.0)
    joined.refresh()
    n = model.model.layers[0].self_attn.q_proj.weight.shape[0]
    assert torch.equal(joined.weight[n : n + k_proj.weight.shape[0]], k_proj.weight)
    assert k_proj.weight.data_ptr() == joined.weight[n].data_ptr()


def test_joined_a_second_time_the_parameters_stay_where_they_are(make_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = make_llama(attention_bias=True)
    first, second = join_all(model), join_all(model)
    for a, b in zip(first, second, strict=True):
        assert a.weight.data_ptr() == b.weight.data_ptr() and a.weight.shape == b.weight.shape
        assert (a.bias is None) == (b.bias is None)
        assert a.bias is None or a.bias.data_ptr() == b.bias.data_ptr()
