"""A parked engine holds no significant memory and loses none of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.engine.test_adapters import update
from tests.engine.test_merged import adapted, driver_of, made, sampled, scored
from upshot.engine.engine import Engine
from upshot.engine.sequence import Rules

Make = Callable[..., LlamaForCausalLM]
PROMPTS = [[5, 6, 7, 8], [5, 6, 7, 9, 11, 12], [40, 41]]


def asked(engine: Engine) -> list[Any]:
    return [engine.submit(ids, Rules(max_tokens=12, seed=i), n=2) for i, ids in enumerate(PROMPTS)]


def said(groups: list[Any]) -> list[tuple[list[int], list[float]]]:
    return [(seq.ids, seq.logprobs) for group in groups for seq in group]


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_requests_in_flight_continue_from_their_ids_after_a_pause(make_llama: Make, steps: int) -> None:
    straight = made(make_llama())
    expected = asked(straight)
    straight.run_until_done()
    engine = made(make_llama())
    groups = asked(engine)
    for _ in range(steps):
        engine.step()
    engine.park()
    engine.run_until_done()
    assert not engine.parked
    for (ids, logprobs), (own, found) in zip(said(expected), said(groups), strict=True):
        assert own == ids
        torch.testing.assert_close(torch.tensor(found), torch.tensor(logprobs), atol=1e-4, rtol=1e-4)


def test_a_parked_engine_holds_no_pages_no_window_and_no_merged_weights(make_llama: Make) -> None:
    engine = made(adapted(make_llama()))
    asked(engine)
    engine.step()
    engine.step()
    engine.park()
    runner = engine.runner
    held = [runner.store.k, runner.store.v, runner.window.k, runner.window.v]
    assert not any(tensor.numel() for tensor in held)
    assert not driver_of(engine).weights.held and not driver_of(engine).layers
    assert engine.pool.held == 0 and engine.scheduler.busy


def test_weights_changed_while_it_is_parked_are_used_afterwards(make_llama: Make) -> None:
    model = adapted(make_llama())
    engine = made(model)
    sampled(engine)
    engine.park()
    update(model)
    assert engine.weights_changed() == 1
    ids, logprobs = sampled(engine)
    torch.testing.assert_close(logprobs, scored(model, ids), atol=2e-4, rtol=1e-4)


def test_requests_that_arrive_while_it_is_parked_wake_it(make_llama: Make) -> None:
    engine = made(make_llama())
    engine.park()
    engine.park()
    [seq] = engine.submit([5, 6, 7], Rules(max_tokens=3))

    async def run() -> None:
        engine.wake()
        while engine.scheduler.busy:
            await asyncio.sleep(0)

    asyncio.run(run())
    assert len(seq.sampled) == 3 and not engine.parked


def test_merged_in_place_the_model_gets_its_weights_back_bit_for_bit(make_llama: Make) -> None:
    model = adapted(make_llama().to(torch.bfloat16), "embedding and head")
    update(model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    engine = made(model, merge="in place")
    assert any(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    ids, logprobs = sampled(engine)
    engine.park()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    torch.testing.assert_close(logprobs, scored(model, ids), atol=0.15, rtol=0.05)
    update(model)
    engine.weights_changed()
    ids, logprobs = sampled(engine)
    engine.park()
    torch.testing.assert_close(logprobs, scored(model, ids), atol=0.15, rtol=0.05)
    sampled(engine)
    asyncio.run(engine.aclose())
    assert all(torch.equal(w, before[name]) for name, w in model.named_parameters() if "base_layer" in name)


@pytest.mark.parametrize("kind", ["lora", "dora", "embedding and head", "tied", "whole modules"])
def test_merging_in_place_samples_the_same_as_a_merged_copy(make_llama: Make, kind: str) -> None:
    tied = kind == "tied"
    model = adapted(make_llama(tie_word_embeddings=tied), "embedding and head" if tied else kind)
    update(model)
    copied = sampled(made(model))
    lent = made(model, merge="in place")
    own = sampled(lent)
    assert own[0] == copied[0]
    torch.testing.assert_close(own[1], copied[1], atol=2e-4, rtol=1e-4)
    lent.weights_changed()
    torch.testing.assert_close(sampled(lent)[1], copied[1], atol=2e-4, rtol=1e-4)
