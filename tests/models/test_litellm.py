"""litellm as a backend, and the openai package's types, against a real server on loopback."""

import asyncio

import pytest

from tests.models.misbehaving_server import MODEL, MisbehavingServer, answer_body
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.models.base import ModelCallError, Request
from upshot.models.client.budget import Budget
from upshot.models.connect import connect
from upshot.models.openai_format import chat_body, completion_body, read_answer

openai = pytest.importorskip("openai")
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def ask(text="hello there", **options):
    return Request([Message("user", text)], **options)


def with_server(body, server=None, **spec):
    pytest.importorskip("litellm")

    async def run():
        options = {"model": MODEL, "via": "litellm", "backoff_s": 0.01, **spec}
        async with (
            MisbehavingServer(**(server or {})) as host,
            connect({"url": host.url, **options}, role="user") as model,
        ):
            return await body(model, host)

    return asyncio.run(run())


def test_our_bodies_and_answers_are_those_of_the_openai_types():
    from openai.types import Completion as TextCompletion
    from openai.types.chat import ChatCompletion

    chat = answer_body("/v1/chat/completions", {"model": "m", "messages": [{"content": "a b"}], "n": 2}, "x y z")
    typed = ChatCompletion.model_validate(chat, strict=True)
    assert read_answer(typed.model_dump()) == read_answer(chat)
    text = answer_body("/v1/completions", {"model": "m", "prompt": [1, 2]}, "x")
    assert read_answer(TextCompletion.model_validate(text, strict=True).model_dump()) == read_answer(text)
    request = ask(sampling=Sampling(seed=3, stop=("a",), top_p=0.5), n=2, schema=SCHEMA)
    body = chat_body(request, 2, 3, schema=True, ids=False)
    known = openai.types.chat.completion_create_params.CompletionCreateParamsNonStreaming.__annotations__
    assert set(body) <= set(known)
    known = openai.types.completion_create_params.CompletionCreateParamsNonStreaming.__annotations__
    assert set(completion_body(Request([1, 2], request.sampling), 2, 3, ids=False)) <= set(known)


def test_a_call_goes_through_the_library_and_comes_back_whole():
    async def body(model, server):
        sampling = Sampling(max_tokens=9, temperature=0.25, seed=4)
        out = await model.generate(ask(n=2, sampling=sampling, schema=SCHEMA))
        assert [c.text for c in out] == ["hello there"] * 2
        assert (out[0].prompt_tokens, out[0].completion_tokens, out[0].finish) == (2, 2, "stop")
        sent = server.records[0].body
        assert (sent["max_tokens"], sent["temperature"], sent["seed"], sent["n"]) == (9, 0.25, 4, 2)
        assert sent["response_format"]["json_schema"]["schema"] == SCHEMA
        assert out[0].cost > 0

    with_server(body, price_in=1, price_out=2)


def test_failures_are_retried_by_our_client_and_counted_once():
    faults = {"drop": 0.08, "limit_rate": 0.08, "malformed": 0.08, "error": 0.05}

    async def body(model, server):
        answers = await asyncio.gather(*(model.generate(ask(f"call {i}")) for i in range(60)))
        assert [answer[0].text for answer in answers] == [f"call {i}" for i in range(60)]
        stats = model.stats()
        assert len(server.served()) == stats["user/calls"] == 60
        assert stats["user/retries"] == len(server.records) - 60 > 0

    with_server(body, faults, timeout_s=60, concurrency=30)


@pytest.mark.parametrize(
    ("fault", "reason"), [("error", "http_500"), ("limit_rate", "rate_limited"), ("stall", "timeout")]
)
def test_a_lasting_failure_has_its_reason(fault, reason):
    async def body(model, server):
        with pytest.raises(ModelCallError) as caught:
            await model.generate(ask())
        assert caught.value.reason == reason

    timeout_s = 0.5 if fault == "stall" else 60
    with_server(body, {fault: 1.0}, retries=1, timeout_s=timeout_s, patience_s=0.1)


def test_a_refused_schema_is_remembered():
    async def body(model, server):
        await model.generate(ask(schema=SCHEMA))
        await model.generate(ask(schema=SCHEMA))
        assert not model.abilities.schema
        assert ["response_format" in r.body for r in server.records] == [True, False, False]

    with_server(body, {"structured": False})


def test_a_wrong_key_and_an_unknown_model_are_user_errors(monkeypatch):
    async def body(model, server):
        with pytest.raises(UserError):
            await model.generate(ask())

    monkeypatch.setenv("SOME_KEY", "wrong")
    with_server(body, {"key": "right"}, api_key_env="SOME_KEY")
    with_server(body, {}, model="no-such-model")


def test_the_openai_client_is_not_a_backend():
    with pytest.raises(UserError, match=r"models.user.via = 'openai': input should be 'http' or 'litellm'"):
        connect({"url": "http://127.0.0.1:9/v1", "model": MODEL, "via": "openai"}, role="user")


def test_missing_settings_of_a_provider_are_reported_before_any_work(monkeypatch):
    pytest.importorskip("litellm")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UserError, match="OPENAI_API_KEY"):
        asyncio.run(connect("openai/gpt-4o-mini").start())
    with pytest.raises(UserError, match=r"no provider 'Qwen'.*'local:Qwen/Qwen2.5-0.5B'"):
        asyncio.run(connect("Qwen/Qwen2.5-0.5B").start())
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    with pytest.raises(UserError, match="price_in"):
        asyncio.run(connect("openai/unheard-of", budget=Budget(max_dollars=1)).start())


def test_list_prices_come_from_litellm(monkeypatch):
    pytest.importorskip("litellm")
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    model = connect("openai/gpt-4o-mini", budget=Budget(max_dollars=1))
    asyncio.run(model.start())
    assert (model.price_in, model.price_out) == (pytest.approx(0.15), pytest.approx(0.6))
