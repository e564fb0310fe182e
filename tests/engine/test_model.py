"""The engine behind the model interface."""

from __future__ import annotations

import asyncio
import json

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from upshot.chat import Message
from upshot.engine import grammar
from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.model import EngineModel
from upshot.errors import UserError
from upshot.models.base import Completion, ModelCallError, Request, Sampling


@pytest.fixture
def model(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> EngineModel:
    return EngineModel(Engine(llama), tokenizer, "tiny")


def ask(model: EngineModel, *requests: Request) -> list[list[Completion]]:
    async def main() -> list[list[Completion]]:
        return await asyncio.gather(*(model.generate(r) for r in requests))

    return asyncio.run(main())


def test_messages_go_in_and_text_ids_and_logprobs_come_out(model: EngineModel) -> None:
    [[one, two]] = ask(model, Request([Message("user", "hi")], Sampling(max_tokens=12, seed=1), n=2))
    assert one.ids and one.logprobs and len(one.ids) == len(one.logprobs) <= 12
    assert one.ids != two.ids
    assert one.prompt_tokens == len(model.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))


def test_same_requests_and_seeds_give_the_same_run(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    def run() -> list[list[Completion]]:
        model = EngineModel(Engine(llama), tokenizer)
        return ask(model, *(Request([3 + i, 4, 5], Sampling(max_tokens=9)) for i in range(30)))

    assert run() == run()


def test_a_stop_string_ends_the_text_before_it(model: EngineModel) -> None:
    [[free]] = ask(model, Request([5, 6, 7], Sampling(max_tokens=40, temperature=0, seed=0)))
    stop = free.text[3:5]
    [[cut]] = ask(model, Request([5, 6, 7], Sampling(max_tokens=40, temperature=0, stop=(stop,), seed=0)))
    assert cut.finish == "stop" and cut.text == free.text[: free.text.find(stop)]
    assert cut.ids == free.ids[: len(cut.ids)]  # type: ignore[index]


def test_top_logprobs_are_sorted_and_hold_the_greedy_id(model: EngineModel) -> None:
    [[out]] = ask(model, Request([5, 6, 7], Sampling(max_tokens=5, temperature=0), top_logprobs=4))
    assert out.top_logprobs is not None and out.ids is not None and out.logprobs is not None
    for token, logprob, top in zip(out.ids, out.logprobs, out.top_logprobs, strict=True):
        assert top[0] == (token, logprob) and [p for _, p in top] == sorted((p for _, p in top), reverse=True)


def test_a_cancelled_call_frees_its_pages(model: EngineModel) -> None:
    async def main() -> None:
        task = asyncio.create_task(model.generate(Request([5, 6, 7], Sampling(max_tokens=3000, stop_ids=()))))
        for _ in range(20):
            await asyncio.sleep(0)
        assert model.engine.pool.held > 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert model.engine.pool.held == 0

    asyncio.run(main())


def test_too_many_waiting_is_an_error_with_a_reason(
    llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = EngineModel(Engine(llama, settings=EngineSettings(max_waiting=1)), tokenizer)
    with pytest.raises(ModelCallError) as error:
        ask(model, *(Request([5, 6], Sampling(max_tokens=3)) for _ in range(3)))
    assert error.value.reason == "rate_limited"


def test_a_prompt_outside_the_vocabulary_is_refused(model: EngineModel) -> None:
    with pytest.raises(UserError, match="vocabulary"):
        ask(model, Request([5, 999], Sampling(max_tokens=3)))


@pytest.mark.skipif(not grammar.available(), reason="llguidance is not installed")
def test_a_json_schema_is_followed(model: EngineModel) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "mood": {"enum": ["good", "bad"]}},
        "required": ["ok", "mood"],
        "additionalProperties": False,
    }
    requests = [Request([5, 6, 7 + i], Sampling(max_tokens=200, seed=i), schema=schema) for i in range(5)]
    for [out] in ask(model, *requests, Request([9, 9], Sampling(max_tokens=30)))[:5]:
        said = json.loads(out.text)
        assert set(said) == {"ok", "mood"} and said["mood"] in ("good", "bad") and out.finish == "stop"
