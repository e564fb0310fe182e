"""Calls to an OpenAI-compatible endpoint, against a real server on loopback."""

import asyncio
import json
import time

import pytest

from tests.models.misbehaving_server import MODEL, MisbehavingServer
from tests.patience import patience
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.models.base import ModelCallError, Request
from upshot.models.connect import connect, connect_all

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def ask(text="hello there", **options):
    return Request([Message("user", text)], **options)


def with_server(body, server=None, **spec):
    """Run `body(model, server)` against a fresh server and a started model."""

    async def run():
        async with (
            MisbehavingServer(**(server or {})) as host,
            connect({"url": host.url, "backoff_s": 0.01, **spec}, role="user") as model,
        ):
            return await body(model, host)

    return asyncio.run(run())


def test_messages_go_to_chat_and_come_back_with_usage():
    async def body(model, server):
        sampling = Sampling(max_tokens=7, temperature=0.5, top_p=0.9, stop=("END",), seed=11)
        (completion,) = await model.generate(ask(sampling=sampling))
        assert (completion.text, completion.finish) == ("hello there", "stop")
        assert (completion.prompt_tokens, completion.completion_tokens) == (2, 2)
        (record,) = server.records
        assert record.path == "/v1/chat/completions"
        assert record.body == {
            "messages": [{"role": "user", "content": "hello there"}],
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["END"],
            "seed": 11,
            "model": MODEL,
        }

    with_server(body)


def test_token_ids_go_to_completions_and_come_back_with_log_probabilities():
    async def body(model, server):
        assert model.abilities.ids_out
        (completion,) = await model.generate(Request([5, 6, 7]))
        assert server.records[0].path == "/v1/completions"
        assert server.records[0].body["prompt"] == [5, 6, 7]
        assert completion.ids == (*b"5 6 7", 0)
        assert completion.logprobs == (-0.5,) * 6
        (completion,) = await model.generate(ask("hi"))
        assert completion.ids == (*b"hi", 0)

    with_server(body, {"owned_by": "vllm"})


def test_endpoints_that_return_no_ids_are_not_asked_for_them():
    async def body(model, server):
        (completion,) = await model.generate(Request([5, 6, 7]))
        assert completion.ids is None
        assert completion.logprobs is None
        assert "return_token_ids" not in server.records[0].body

    with_server(body)


@pytest.mark.parametrize("at_most", [1000, 2, 1])
def test_n_samples_are_returned_even_by_endpoints_that_give_fewer(at_most):
    async def body(model, server):
        out = await model.generate(ask(n=4, sampling=Sampling(seed=1)))
        assert len(out) == 4
        assert len({record.body["seed"] for record in server.records}) == len(server.records) == -(-4 // at_most)
        assert sum(c.completion_tokens for c in out) == model.stats()["user/completion_tokens"] == 8

    with_server(body, {"choices_at_most": at_most})


def test_a_schema_is_sent_and_its_refusal_remembered():
    async def body(model, server):
        for _ in range(3):
            await model.generate(ask(schema=SCHEMA))
        return [("response_format" in r.body, r.outcome) for r in server.records], model.abilities.schema

    sent, able = with_server(body)
    assert sent == [(True, "ok")] * 3
    assert able
    sent, able = with_server(body, {"structured": False})
    assert sent == [(True, "rejected"), (False, "ok"), (False, "ok"), (False, "ok")]
    assert not able


def test_tools_go_in_and_calls_come_out():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}

    async def body(model, server):
        (completion,) = await model.generate(ask(tools=[tool]))
        assert server.records[0].body["tools"] == [tool]
        assert (completion.text, completion.finish, completion.tool_calls) == ("", "tool_calls", (call,))

    with_server(body, {"reply": lambda body: {"role": "assistant", "content": None, "tool_calls": [call]}})


def test_a_refusal_is_a_failure_and_not_an_empty_reply():
    async def body(model, server):
        with pytest.raises(ModelCallError) as caught:
            await model.generate(ask())
        assert caught.value.reason == "refused"
        assert len(server.records) == 1

    with_server(body, {"reply": lambda body: {"role": "assistant", "content": None, "refusal": "no"}})


@pytest.mark.parametrize("header", ["0.4", "date"])
def test_a_rate_limit_is_obeyed_for_as_long_as_it_asks(header):
    async def body(model, server):
        server.faults = (("limited", 1.0),)
        began = time.monotonic()  # before the answer is seen here, which may take a while
        call = asyncio.create_task(model.generate(ask()))
        while not server.records:
            await asyncio.sleep(0.005)
        server.faults = ()
        await call
        assert model.stats()["user/retries/rate_limited"] == 1
        assert time.monotonic() - began >= (0.4 if header == "0.4" else 0.9)

    with_server(body, {"retry_after": header})


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("drop", "connection"),
        ("malformed", "bad_response"),
        ("stall", "timeout"),
        ("error", "http_500"),
        ("limit_rate", "rate_limited"),
    ],
)
def test_a_lasting_failure_has_its_reason(fault, reason):
    async def body(model, server):
        with pytest.raises(ModelCallError) as caught:
            await model.generate(ask())
        assert caught.value.reason == reason
        stats = model.stats()
        assert stats["user/failed"] == stats[f"user/failed/{reason}"] == 1
        assert stats["user/calls"] == 1
        return len(server.records)

    attempts = with_server(
        body, {fault: 1.0}, retries=2, timeout_s=patience(0.3) if fault == "stall" else 30, patience_s=0.3
    )
    once_more = 2  # a timeout is repeated once if no answer has ever arrived in time
    assert attempts >= 3 if fault == "limit_rate" else attempts == (once_more if fault == "stall" else 3)


def test_a_prompt_that_is_too_long_is_not_retried():
    def reject(body):
        raise AssertionError("not reached")

    async def body(model, server):
        problem = (400, {"error": {"message": "This model's maximum context length is 10 tokens"}})
        server._problem = lambda body: problem
        with pytest.raises(ModelCallError) as caught:
            await model.generate(ask(schema=SCHEMA))
        assert caught.value.reason == "too_long"
        assert len(server.records) == 1
        assert model.abilities.schema

    with_server(body, {"reply": reject})


def test_a_bad_request_that_is_not_about_the_schema_leaves_it_on():
    async def body(model, server):
        server._problem = lambda body: (400, {"error": {"message": "temperature must be 1"}})
        with pytest.raises(ModelCallError, match="temperature must be 1"):
            await model.generate(ask(schema=SCHEMA))
        assert model.abilities.schema

    with_server(body)


def test_endpoints_that_need_the_other_length_field_get_it():
    async def body(model, server):
        refusal = (400, {"error": {"message": "max_tokens is not supported; use 'max_completion_tokens' instead."}})
        server._problem = lambda body: refusal if "max_tokens" in body else None
        await model.generate(ask())
        await model.generate(ask())
        assert [r.outcome for r in server.records] == ["rejected", "ok", "ok"]
        assert server.records[-1].body["max_completion_tokens"] == 512

    with_server(body)


def test_the_only_served_model_is_found_and_an_unknown_one_is_named():
    async def several():
        async with MisbehavingServer(models=("a", "b")) as server:
            with pytest.raises(UserError, match=r"serves a, b; name one in 'model'"):
                await connect(server.url).start()
            async with connect(f"{server.url}#b") as model:
                await model.generate(ask())
            async with connect(f"{server.url}#c") as model:
                with pytest.raises(UserError, match="does not know the model 'c'"):
                    await model.generate(ask())

    asyncio.run(several())


def test_an_unreachable_endpoint_is_reported_before_any_work():
    with pytest.raises(UserError, match=r"cannot reach http://127\.0\.0\.1:9/v1"):
        asyncio.run(connect({"url": "http://127.0.0.1:9/v1", "retries": 1, "backoff_s": 0.01}).start())


def test_keys_come_from_the_environment_and_a_missing_or_wrong_one_is_reported(monkeypatch):
    async def body(server, **spec):
        async with connect({"url": server.url, **spec}) as model:
            return await model.generate(ask())

    async def run():
        async with MisbehavingServer(key="s3cret") as server:
            with pytest.raises(UserError, match="MY_KEY, which is not set"):
                await body(server, api_key_env="MY_KEY")
            with pytest.raises(UserError, match="api_key_env"):
                await body(server)
            monkeypatch.setenv("MY_KEY", "wrong")
            with pytest.raises(UserError, match=r"rejects the request \(HTTP 401\); is the key in \$MY_KEY right"):
                await body(server, api_key_env="MY_KEY")
            monkeypatch.setenv("MY_KEY", "s3cret")
            await body(server, api_key_env="MY_KEY")
            monkeypatch.setenv("HEADER", "Bearer s3cret")
            await body(server, headers_env={"Authorization": "HEADER"})

    asyncio.run(run())


def test_extra_fields_are_added_and_omitted_ones_left_out():
    async def body(model, server):
        await model.generate(ask(sampling=Sampling(seed=3)))
        sent = server.records[0].body
        assert sent["chat_template_kwargs"] == {"enable_thinking": False}
        assert "seed" not in sent

    with_server(body, extra_body={"chat_template_kwargs": {"enable_thinking": False}}, omit=["seed"])


def test_calls_in_flight_of_all_roles_stay_within_the_endpoints_limit():
    async def run():
        async with MisbehavingServer(latency=0.02) as server:
            models = connect_all(
                {"user": {"url": server.url, "concurrency": 5}, "judge": {"url": server.url, "temperature": 0}}
            )
            assert models["user"] is not models["judge"]
            for model in models.values():
                await model.start()
            await asyncio.gather(*(model.generate(ask()) for model in models.values() for _ in range(20)))
            for model in models.values():
                await model.aclose()
            assert server.most_in_flight == 5
            assert models["user"].stats()["user/calls"] == models["judge"].stats()["judge/calls"] == 20

    asyncio.run(run())


def test_cost_and_latency_are_counted_by_role():
    async def body(model, server):
        (completion,) = await model.generate(ask("one two three four"))
        await model.generate(ask("x", role="judge"))
        stats = model.stats()
        assert completion.cost == pytest.approx(stats["user/cost"])
        assert stats["user/cost"] == pytest.approx((4 * 1 + 4 * 10) / 1e6)
        assert 0.02 <= stats["user/latency_p50"] <= stats["user/latency_p95"]
        assert stats["judge/calls"] == 1

    with_server(body, {"latency": 0.02}, price_in=1, price_out=10)


def test_unicode_arrives_as_it_was_sent():
    text = "naïve \\frac{1}{2} “q” 你好 🙂 \u2028"

    async def body(model, server):
        (completion,) = await model.generate(ask(text))
        assert completion.text == text
        assert json.loads(json.dumps(server.records[0].body))["messages"][0]["content"] == text

    with_server(body)


def scored(body):
    """What vLLM answers to `echo` with `logprobs` and `max_tokens: 0`."""
    found = [None, *(-float(i) for i in body["prompt"][1:])]
    choice = {"index": 0, "text": "…", "finish_reason": "length", "logprobs": {"token_logprobs": found}}
    return {"choices": [choice], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 0}}


def test_given_ids_are_scored_by_an_echo_of_the_prompt(tmp_path):
    async def body(model, server):
        assert model.abilities.scores
        assert await model.logprobs([5, 6, 7], [8, 9]) == (-8.0, -9.0)
        assert await model.logprobs([5, 6, 7, 8], [9]) == (-9.0,)
        assert await model.logprobs([5, 6, 7], [8, 9]) == (-8.0, -9.0)
        first, _ = server.records  # the third came from the cache
        assert first.path == "/v1/completions"
        fields = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
        assert first.body == {**fields, "model": MODEL}
        assert model.stats()["user/prompt_tokens"] == 10

    with_server(body, {"owned_by": "vllm", "reply": scored}, cache=str(tmp_path))


def test_a_scoring_that_fails_once_is_retried():
    async def body(model, server):
        assert await asyncio.gather(*(model.logprobs([5], [6, i]) for i in range(2, 22))) == [
            (-6.0, -float(i)) for i in range(2, 22)
        ]
        assert server.outcomes["dropped"] and server.outcomes["limited"] and server.outcomes["malformed"]

    faults = {"drop": 0.2, "limit_rate": 0.2, "malformed": 0.2, "retry_after": "0.01"}
    with_server(body, {"owned_by": "vllm", "reply": scored, **faults}, retries=20)


def test_an_endpoint_that_cannot_score_given_ids_is_named():
    async def unknown(model, server):
        with pytest.raises(UserError, match="does not report the log-probabilities of given ids"):
            await model.logprobs([5, 6], [7])
        assert not server.records

    async def silent(model, server):
        with pytest.raises(UserError, match=r"given ids .3 log-probabilities came back for the prompt's 3 ids"):
            await model.logprobs([5, 6], [7])

    with_server(unknown)
    with_server(silent, {"reply": lambda body: "hm"}, token_ids=True)
