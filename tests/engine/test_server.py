"""The server, spoken to by the clients people use."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from upshot.engine.engine import Engine, EngineSettings
from upshot.engine.model import EngineModel
from upshot.engine.server import Server
from upshot.engine.streaming import GrowingText

KEY = "test-key"


@contextmanager
def serving(server: Server) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inner = uvicorn.Server(uvicorn.Config(server.app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=inner.run, daemon=True)
    thread.start()
    for _ in range(400):
        if inner.started:
            break
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        inner.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def server(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Server:
    return Server(EngineModel(Engine(llama), tokenizer, "tiny"), KEY)


@pytest.fixture(scope="module")
def url(server: Server) -> Iterator[str]:
    with serving(server) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


HI = [{"role": "user", "content": "hi"}]


def test_openai_client_chats_with_n_seed_and_logprobs(client: Any) -> None:
    def ask() -> Any:
        return client.chat.completions.create(
            model="tiny", messages=HI, n=3, seed=5, max_tokens=8, logprobs=True, top_logprobs=2
        )

    first, second = ask(), ask()
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    assert len(first.choices) == 3 and first.usage.completion_tokens <= 24
    entry = first.choices[0].logprobs.content[0]
    assert entry.logprob <= 0 and len(entry.top_logprobs) == 2


def test_openai_client_streams_what_it_would_have_got_at_once(client: Any) -> None:
    asked = {"model": "tiny", "messages": HI, "seed": 3, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_take_text_ids_and_batches(client: Any) -> None:
    ids = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=6, temperature=0, logprobs=2)
    assert len(ids.choices[0].logprobs.token_logprobs) == ids.usage.completion_tokens
    both = client.completions.create(model="tiny", prompt=[[5, 6, 7], [8, 9]], max_tokens=6, temperature=0)
    assert both.choices[0].text == ids.choices[0].text and len(both.choices) == 2
    text = client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=3, stream=True)
    assert {c.choices[0].index for c in text} == {0, 1}


def test_echo_scores_the_prompt(client: Any, server: Server) -> None:
    out = client.completions.create(
        model="tiny", prompt=[5, 6, 7, 8], max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    got = out.choices[0].logprobs
    own, _ = server.model.engine.score([5, 6, 7, 8])
    assert got.token_logprobs[0] is None and got.token_logprobs[1:4] == pytest.approx(own)
    assert len(got.tokens) == 5


def test_stop_strings_and_extra_sampling_fields(client: Any) -> None:
    asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0}
    free = client.completions.create(**asked).choices[0].text
    stop = free[4:6]
    cut = client.completions.create(**asked, stop=[stop], extra_body={"top_k": 5, "min_p": 0.1}).choices[0]
    assert cut.text == free[: free.find(stop)] and cut.finish_reason == "stop"
    streamed = "".join(c.choices[0].text for c in client.completions.create(**asked, stop=stop, stream=True))
    assert streamed == cut.text


def test_a_json_schema_is_enforced(client: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    out = client.chat.completions.create(model="tiny", messages=HI, response_format=form, max_tokens=100)
    assert json.loads(out.choices[0].message.content)["n"] in (1, 2)


def test_litellm_talks_to_it(url: str) -> None:
    litellm = pytest.importorskip("litellm")
    out = litellm.completion(model="openai/tiny", api_base=url + "/v1", api_key=KEY, messages=HI, max_tokens=5)
    assert out.usage.completion_tokens <= 5 and out.choices[0].finish_reason in ("stop", "length")


def test_lm_eval_local_completions_scores_and_generates(
    url: str, server: Server, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    tokenizer.save_pretrained(tmp_path)
    lm = LocalCompletionsAPI(
        model="tiny", base_url=url + "/v1/completions", tokenizer_backend="huggingface", tokenizer=str(tmp_path)
    )
    [(logprob, greedy)] = lm.loglikelihood([Instance("loglikelihood", {}, ("one two", " three"), 0)])
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    own, _ = server.model.engine.score(ids)
    assert logprob == pytest.approx(sum(own[-len(" three") :]), abs=1e-3) and greedy is False
    asked = {"until": ["q"], "max_gen_toks": 6, "temperature": 0}
    [text] = lm.generate_until([Instance("generate_until", {}, ("one", asked), 0)])
    assert isinstance(text, str)


def test_errors_name_what_is_wrong(url: str) -> None:
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        assert http.get("/v1/models", headers={"Authorization": "Bearer no"}).status_code == 401
        bad = http.post("/v1/chat/completions", json={"messages": HI, "temperature": -1})
        assert bad.status_code == 400 and "temperature" in bad.json()["error"]["message"]
        bad = http.post("/v1/completions", json={"prompt": [99999]})
        assert bad.status_code == 400 and "vocabulary" in bad.json()["error"]["message"]


def test_health_and_metrics(url: str) -> None:
    assert httpx.get(url + "/health").json()["status"] == "ok"
    text = httpx.get(url + "/metrics").text
    assert "# TYPE upshot_generated_total counter" in text and "upshot_pages_held " in text


def wait_for(happened: Callable[[], bool]) -> None:
    for _ in range(500):
        if happened():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen within 10 s")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages(server: Server, url: str, stream: bool) -> None:
    engine = server.model.engine
    body = {"prompt": [5, 6, 7], "max_tokens": 4000, "stream": stream, "n": 4, "seed": 1}
    headers = {"Authorization": f"Bearer {KEY}"}
    before = server.counts["disconnected"]
    kept, engine.eos_ids, server.model.end_ids = (engine.eos_ids, server.model.end_ids), frozenset(), set()
    try:
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.Client(timeout=1.0) as http,
            http.stream("POST", url + "/v1/completions", json=body, headers=headers) as r,
        ):
            for i, _ in enumerate(r.iter_lines()):
                if i > 5:
                    raise httpx.ReadTimeout("gone")
        wait_for(lambda: engine.pool.held == 0 and server.counts["disconnected"] > before)
    finally:
        engine.eos_ids, server.model.end_ids = kept


def test_too_many_waiting_get_429(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model = EngineModel(Engine(llama, settings=EngineSettings(max_waiting=2)), tokenizer, "tiny")
    with serving(Server(model)) as url:
        answer = httpx.post(url + "/v1/completions", json={"prompt": [5, 6], "n": 3, "max_tokens": 3})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert httpx.post(url + "/v1/completions", json={"prompt": [5, 6], "max_tokens": 3}).status_code == 200


def test_without_a_key_a_web_page_cannot_ask(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    with serving(Server(EngineModel(Engine(llama), tokenizer, "tiny"))) as url:
        body = '{"prompt": [5, 6], "max_tokens": 1}'
        for headers, status in (
            ({"Content-Type": "text/plain"}, 415),
            ({"Content-Type": "application/json", "Host": "evil.example"}, 403),
            ({"Content-Type": "application/json"}, 200),
        ):
            answer = httpx.post(url + "/v1/completions", content=body, headers=headers)
            assert answer.status_code == status, answer.text


def test_growing_text_sends_whole_characters_and_no_stop_string(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode("naïve 🙂 STOP it", add_special_tokens=False)
    growing = GrowingText(tokenizer, ["STOP"])
    pieces = [growing.add(t, last=i == len(ids) - 1) for i, t in enumerate(ids)]
    assert "".join(pieces) == "naïve 🙂 " and not any("�" in p or "S" in p for p in pieces)
