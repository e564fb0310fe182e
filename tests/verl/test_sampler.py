"""Our engine as a server of a cluster: what it accepts, and which weights it samples with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from upshot.config.recipe import TinyConfig
from upshot.core.errors import UserError
from upshot.engine.engine import Engine
from upshot.engine.sequence import Rules
from upshot.models.rendering import Renderer
from upshot.models.tiny import tiny_model, tiny_tokenizer
from upshot.tasks.slots import SlotsTask
from upshot.verl.sampler import PackedTensor, Sampler, parts

TASK = SlotsTask(rows_per_split=8)
TOKENIZER = tiny_tokenizer(TASK.vocabulary())
RENDERER = Renderer(TOKENIZER)
PARAMS = {"max_tokens": 8, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "logprobs": True, "repetition_penalty": 1.0}


def model(seed: int) -> Any:
    return tiny_model(TinyConfig(hidden=16, layers=1, heads=2, mlp=32), TOKENIZER, seed).eval()


def prompt() -> list[int]:
    return RENDERER.prompt_ids(TASK.rows("train")[0].messages)


def sampler(seed: int = 0) -> Sampler:
    return Sampler(model(seed), RENDERER.end_ids)


async def named(module: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for name, tensor in module.state_dict().items():
        yield name, tensor


async def sync(to: Sampler, module: Any, step: int, most: int = 1 << 30) -> int:
    """Send all weights, in this many parts."""
    to.begin_weights()
    sent = 0
    async for part in parts(named(module), torch.float32, most):
        to.load_weights(part)
        sent += 1
    to.end_weights(step)
    return sent


def test_a_seed_gives_the_same_sample_as_in_local_mode() -> None:
    here = Engine(model(0), RENDERER.end_ids)
    (seq,) = here.submit(prompt(), Rules(max_tokens=8, seed=7))
    here.run_until_done()
    said = [asyncio.run(sampler().sample(prompt(), {**PARAMS, "seed": 7})) for _ in range(2)]
    assert [one.ids for one in said] == [seq.sampled] * 2
    assert said[0].logprobs == pytest.approx(seq.logprobs, abs=1e-6)
    assert len(said[0].logprobs) == len(said[0].ids)


def test_without_a_seed_two_requests_differ() -> None:
    async def both() -> list[list[int]]:
        own = sampler()
        return [(await own.sample(prompt(), {**PARAMS, "max_tokens": 30})).ids for _ in range(2)]

    first, second = asyncio.run(both())
    assert first != second


def test_after_a_sync_the_new_weights_sample_and_the_step_is_reported() -> None:
    async def run() -> tuple[Any, ...]:
        own = sampler(0)
        before = await own.sample(prompt(), {**PARAMS, "seed": 3})
        sent = await sync(own, model(1), step=5, most=1000)
        return before, await own.sample(prompt(), {**PARAMS, "seed": 3}), sent

    before, after, sent = asyncio.run(run())
    fresh = asyncio.run(sampler(1).sample(prompt(), {**PARAMS, "seed": 3}))
    assert sent > 2
    assert (before.step, after.step) == (None, 5)
    assert after.ids == fresh.ids and after.logprobs == pytest.approx(fresh.logprobs, abs=1e-6)
    assert after.logprobs != before.logprobs


def test_bfloat16_weights_are_sent_as_bytes() -> None:
    given = torch.randn(3, 4).to(torch.bfloat16)
    packed = PackedTensor.of(given)
    assert packed.data.nbytes == 24 and torch.equal(packed.tensor(), given)


def test_an_unknown_or_absent_weight_is_reported_by_name() -> None:
    own = sampler()
    own.begin_weights()
    with pytest.raises(UserError, match=r"'model\.norm2'.*none of that name"):
        own.load_weights({"model.norm2": PackedTensor.of(torch.zeros(2))})
    with pytest.raises(UserError, match=r"model\.norm\.weight.*has shape \(16,\)"):
        own.load_weights({"model.norm.weight": PackedTensor.of(torch.zeros(2))})
    own.load_weights({"model.norm.weight": PackedTensor.of(torch.ones(16))})
    with pytest.raises(UserError, match=r"sent no weights for model\.embed_tokens\.weight"):
        own.end_weights(1)


def test_requests_wait_while_weights_arrive_and_those_in_flight_are_aborted() -> None:
    async def run() -> tuple[Any, Any]:
        own = sampler()
        early = asyncio.ensure_future(own.sample(prompt(), {**PARAMS, "max_tokens": 200}))
        await asyncio.sleep(0)
        own.begin_weights()
        late = asyncio.ensure_future(own.sample(prompt(), PARAMS))
        for _ in range(5):
            await asyncio.sleep(0)
        assert early.done() and not late.done()
        async for part in parts(named(model(1)), torch.float32, 1 << 30):
            own.load_weights(part)
        own.end_weights(2)
        return await early, await late

    early, late = asyncio.run(run())
    assert early.aborted and not late.aborted and late.step == 2


@pytest.mark.parametrize("given", [{"repetition_penalty": 1.2}, {"frequency_penalty": 0.5}, {"ignore_eos": True}])
def test_what_the_engine_does_not_have_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(given))):
        asyncio.run(sampler().sample(prompt(), {**PARAMS, **given}))


def test_a_stop_id_ends_the_reply() -> None:
    free = asyncio.run(sampler().sample(prompt(), {**PARAMS, "seed": 1}))
    stop = free.ids[1]
    cut = asyncio.run(sampler().sample(prompt(), {**PARAMS, "seed": 1, "stop_token_ids": [stop]}))
    assert cut.ids == free.ids[: free.ids.index(stop) + 1]
