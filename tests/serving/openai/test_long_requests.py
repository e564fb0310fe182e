"""Long requests: checked before they are tokenised, tokenised beside the event loop, dropped with their clients."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.patience import patience
from upshot.core.http_listener import listen
from upshot.engine.engine import Engine, EngineSettings
from upshot.models.engine_model import CHARACTERS_PER_ID, EngineModel
from upshot.serving.openai.base import LONG_BYTES, MAX_BYTES, MOST_LONG
from upshot.serving.openai.server import OpenAIServer

CONTEXT = 4096


class WatchedTokenizer:
    """Records what it is asked to encode, and waits before long texts if told to."""

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self._inner = inner
        self.encoded: list[int] = []
        self.free = threading.Event()
        self.free.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.encoded.append(len(text))
        if len(text) > 1000:
            self.free.wait()
        return self._inner.encode(text, **options)


@pytest.fixture
def watched(tokenizer: PreTrainedTokenizerFast) -> WatchedTokenizer:
    return WatchedTokenizer(tokenizer)


@pytest.fixture
def server(llama: LlamaForCausalLM, watched: WatchedTokenizer) -> OpenAIServer:
    engine = Engine(llama, settings=EngineSettings(max_waiting=100))
    model = EngineModel(engine, watched, "tiny")
    watched.encoded.clear()  # from the template's own text
    return OpenAIServer(model)


@asynccontextmanager
async def serving(server: OpenAIServer) -> AsyncIterator[httpx.AsyncClient]:
    with listen("127.0.0.1", 0) as listener:
        inner = uvicorn.Server(uvicorn.Config(server.app, log_level="critical", timeout_graceful_shutdown=1))
        task = asyncio.create_task(inner.serve(sockets=[listener]))
        limits = httpx.Limits(max_connections=200)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
            yield client
        inner.should_exit = True
        await task


def ask(server: OpenAIServer, path: str, body: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with serving(server) as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


TOO_LONG = "x" * (CHARACTERS_PER_ID * (CONTEXT + 1))


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/v1/completions", {"prompt": TOO_LONG}, "characters"),
        ("/v1/completions", {"prompt": ["a", TOO_LONG]}, "characters"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}, "characters"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}] * (CONTEXT + 1)}, "4097 messages"),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    server: OpenAIServer, watched: WatchedTokenizer, path: str, body: dict[str, Any], word: str
) -> None:
    answer = ask(server, path, body)
    assert answer.status_code == 400 and word in answer.json()["error"]["message"]
    assert sum(watched.encoded) < 10


def test_more_prompts_than_can_wait_are_refused_before_they_are_tokenised(
    server: OpenAIServer, watched: WatchedTokenizer
) -> None:
    assert ask(server, "/v1/completions", {"prompt": ["ab"] * 60, "n": 2}).status_code == 429
    assert ask(server, "/v1/completions", {"prompt": [[5, 6]] * 200_000}).status_code == 429
    assert not watched.encoded


def test_of_a_million_wrong_items_one_is_reported(server: OpenAIServer) -> None:
    answer = ask(server, "/v1/completions", {"prompt": [{}] * 1_000_000})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("prompt.")
    assert len(answer.content) < 1000


def test_a_body_over_the_limit_gets_a_clear_answer(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upshot.core.http_server.LINGER_S", patience(60))
    answer = ask(server, "/v1/completions", {"prompt": "x" * MAX_BYTES})
    assert answer.status_code == 413 and str(MAX_BYTES) in answer.json()["error"]["message"]


def test_health_and_short_requests_are_answered_while_a_long_one_is_read(
    server: OpenAIServer, watched: WatchedTokenizer
) -> None:
    """If their clients hang up in the meantime, the long ones are not read."""
    body = {"prompt": "x" * (CONTEXT // 2), "max_tokens": 1}
    long = json.dumps({**body, "user": "u" * LONG_BYTES}).encode()
    headers = {"Content-Type": "application/json"}

    async def run() -> None:
        async with serving(server) as client:
            first = asyncio.create_task(client.post("/v1/completions", content=long, headers=headers))
            while not watched.encoded:
                await asyncio.sleep(0.001)
            gone = [
                asyncio.create_task(client.post("/v1/completions", content=long, headers=headers)) for _ in range(15)
            ]
            while server._long < MOST_LONG:
                await asyncio.sleep(0.001)
            assert (await client.get("/health")).json()["status"] == "ok"
            assert (await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})).status_code == 200
            assert (await client.post("/v1/completions", content=long, headers=headers)).status_code == 429
            for task in gone:
                task.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            while server._long > 1:
                await asyncio.sleep(0.001)
            watched.free.set()
            assert (await first).status_code == 200
            assert server.counts["disconnected"] == len(gone)

    watched.free.clear()
    try:
        asyncio.run(run())
    finally:
        watched.free.set()
    assert watched.encoded.count(CONTEXT // 2) == 1
