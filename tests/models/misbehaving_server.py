"""An OpenAI-compatible server on loopback that misbehaves on request.

    async with MisbehavingServer(reply=lambda body: "hi", drop=0.05, limit_rate=0.1, stall=0.01) as server:
        ... server.url ...
        assert server.outcomes["ok"] == 10

A bare asyncio protocol, so that it costs little CPU beside the client it tests. It speaks HTTP/1.1 with
Content-Length bodies and keep-alive; it does not speak TLS, chunked requests or streaming. What it does to a request
depends on the request and on how often it came, never on the order in which the requests of many come in.
As a program: `python tests/models/misbehaving_server.py --latency 0.05` prints its URL and serves until killed.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import formatdate
from time import time
from typing import Any

Body = dict[str, Any]
Reply = Callable[[Body], "str | dict[str, Any] | Awaitable[str | dict[str, Any]]"]
MODEL = "test-model"


@dataclass
class Record:
    """One accepted request, and what the server did with it."""

    path: str
    body: Body
    outcome: str
    """ok, dropped, limited, malformed, stalled, error, bad_content, rejected; aborted: the client left first."""


def echo(body: Body) -> str:
    """The last message, or the prompt's ids as text."""
    if "messages" in body:
        return str(body["messages"][-1]["content"])
    return " ".join(map(str, body["prompt"]))


class MisbehavingServer:
    """The server; `records` and `outcomes` list what arrived and how it ended."""

    def __init__(
        self,
        reply: Reply = echo,
        *,
        drop: float = 0.0,
        limit_rate: float = 0.0,
        malformed: float = 0.0,
        stall: float = 0.0,
        error: float = 0.0,
        bad_content: float = 0.0,
        latency: float = 0.0,
        retry_after: str | None = "0.1",
        structured: bool = True,
        choices_at_most: int = 1000,
        key: str | None = None,
        owned_by: str = "test",
        models: tuple[str, ...] = (MODEL,),
        keep_bodies: bool = True,
        seed: int = 0,
        port: int = 0,
    ) -> None:
        self.reply = reply
        self.faults = (
            ("dropped", drop),
            ("limited", limit_rate),
            ("malformed", malformed),
            ("stalled", stall),
            ("error", error),
            ("bad_content", bad_content),
        )
        self.latency = latency
        self.retry_after = retry_after
        """Value of the header sent with a 429; 'date': one second from now, as an HTTP date."""
        self.structured = structured
        """Whether `response_format` is accepted; if not, the answer is 400."""
        self.choices_at_most = choices_at_most
        self.key, self.owned_by, self.models = key, owned_by, models
        self.keep_bodies = keep_bodies
        self.records: list[Record] = []
        self.outcomes: Counter[str] = Counter()
        self.in_flight = self.most_in_flight = 0
        self._seed = seed
        self._asked: Counter[bytes] = Counter()
        self._port = port
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Base address, with /v1."""
        assert self._server is not None, "the server is not started"
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def __aenter__(self) -> MisbehavingServer:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self._port, backlog=2048)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for connection in list(self._connections):
            connection.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def served(self, path: str = "") -> list[Record]:
        """The requests that were answered properly."""
        return [record for record in self.records if record.outcome == "ok" and path in record.path]

    def _fault(self, raw: bytes) -> str:
        if not any(rate for _, rate in self.faults):
            return "ok"
        self._asked[raw] += 1
        draw = random.Random(b"%d %d " % (self._seed, self._asked[raw]) + raw).random()
        for name, rate in self.faults:
            if draw < rate:
                return name
            draw -= rate
        return "ok"

    def handle(self, connection: _Connection, method: str, path: str, headers: bytes, raw: bytes) -> None:
        """Answer one request, now or later."""
        if self.key is not None and f"authorization: bearer {self.key}".encode() not in headers.lower():
            return connection.answer(401, {"error": {"message": "no such key", "code": "invalid_api_key"}})
        if path.endswith("/models"):
            listed = [{"id": name, "object": "model", "owned_by": self.owned_by} for name in self.models]
            return connection.answer(200, {"object": "list", "data": listed})
        if path.endswith("/stats"):
            return connection.answer(200, dict(self.outcomes))
        if not path.endswith("/completions") or method != "POST":
            return connection.answer(404, {"error": {"message": f"no route {path}"}})
        body = json.loads(raw)
        record = Record(path, body if self.keep_bodies else {}, self._fault(raw))
        self.records.append(record)
        problem = self._problem(body)
        if problem:
            record.outcome = "rejected"
            self.outcomes["rejected"] += 1
            return connection.answer(*problem)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        task = asyncio.get_running_loop().create_task(self._serve(connection, record, body))
        connection.pending.add(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(connection.pending.discard)
        return None

    def _problem(self, body: Body) -> tuple[int, Body] | None:
        if body.get("model") not in self.models:
            return 404, {"error": {"message": f"the model '{body.get('model')}' does not exist"}}
        if "response_format" in body and not self.structured:
            return 400, {"error": {"message": "response_format is not supported"}}
        return None

    async def _serve(self, connection: _Connection, record: Record, body: Body) -> None:
        outcome = record.outcome
        try:
            if outcome == "stalled":
                await asyncio.sleep(3600)
            if self.latency:
                await asyncio.sleep(self.latency)
            if outcome == "limited":
                value = formatdate(time() + 2, usegmt=True) if self.retry_after == "date" else self.retry_after
                extra = f"Retry-After: {value}\r\n" if value is not None else ""
                connection.answer(429, {"error": {"message": "slow down"}}, extra)
            elif outcome == "error":
                connection.answer(500, {"error": {"message": "something broke"}})
            else:
                await self._complete(connection, record, body)
        except asyncio.CancelledError:
            record.outcome = "stalled" if outcome == "stalled" else "aborted"
        finally:
            self.in_flight -= 1
            self.outcomes[record.outcome] += 1

    async def _complete(self, connection: _Connection, record: Record, body: Body) -> None:
        reply = self.reply(body)
        if inspect.isawaitable(reply):
            reply = await reply
        if record.outcome == "bad_content":
            reply = '{"response": "unfinished'
        data = json.dumps(answer_body(record.path, body, reply, self.choices_at_most)).encode()
        if record.outcome == "malformed":
            data = data[: len(data) // 2] + b"<html>oops"
        if record.outcome == "dropped":
            if len(data) % 2:  # half of them in the middle of the body
                connection.send(200, data, cut=len(data) // 2)
            connection.transport.close()
        else:
            connection.send(200, data)


def answer_body(path: str, body: Body, reply: str | dict[str, Any], choices_at_most: int = 1000) -> Body:
    """A chat completion or completion in OpenAI's format. For ids, a token is a UTF-8 byte; for usage, a word.

    A reply that has choices is sent unchanged.
    """
    if isinstance(reply, dict) and "choices" in reply:
        return reply
    chat = path.endswith("/chat/completions")
    message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
    text = message.get("content") or ""
    n = min(body.get("n", 1), choices_at_most)
    choices = []
    for index in range(n):
        choice: Body = {"index": index, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop"}
        choice |= {"message": message} if chat else {"text": text}
        ids = [*text.encode(), 0]
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        if body.get("logprobs"):
            scored = [{"token": f"token_id:{i}", "logprob": -0.5, "top_logprobs": []} for i in ids]
            flat = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": [-0.5] * len(ids)}
            choice["logprobs"] = {"content": scored} if chat else flat
        choices.append(choice)
    asked = sum(len(str(m.get("content")).split()) for m in body["messages"]) if chat else len(body["prompt"])
    used = n * len(text.split())
    return {
        "id": "cmpl-1",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1,
        "model": body["model"],
        "choices": choices,
        "usage": {"prompt_tokens": asked, "completion_tokens": used, "total_tokens": asked + used},
    }


class _Connection(asyncio.Protocol):
    """One client connection: requests in, answers out."""

    transport: asyncio.Transport

    def __init__(self, server: MisbehavingServer) -> None:
        self.server = server
        self.buffer = b""
        self.pending: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.server._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server._connections.discard(self)
        for task in self.pending:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            length = 0
            for line in head.split(b"\r\n")[1:]:
                if line[:15].lower() == b"content-length:":
                    length = int(line[15:])
            if len(self.buffer) < end + 4 + length:
                return
            raw = self.buffer[end + 4 : end + 4 + length]
            self.buffer = self.buffer[end + 4 + length :]
            method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
            self.server.handle(self, method, path, head, raw)

    def answer(self, status: int, body: Body, extra: str = "") -> None:
        """Send a JSON body."""
        self.send(status, json.dumps(body).encode(), extra)

    def send(self, status: int, data: bytes, extra: str = "", cut: int | None = None) -> None:
        """Send bytes; `cut`: only this many of those that the header announces."""
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{extra}Content-Length: {len(data)}\r\n\r\n"
        if not self.transport.is_closing():
            self.transport.write(head.encode() + data[:cut])


async def _main() -> None:
    parser = argparse.ArgumentParser(description="serve a misbehaving OpenAI-compatible endpoint on loopback")
    for name in ("drop", "limit-rate", "malformed", "stall", "error", "bad-content", "latency"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--retry-after", default="0.1")
    parser.add_argument("--port", type=int, default=0)
    options = vars(parser.parse_args())
    async with MisbehavingServer(keep_bodies=False, **options) as server:
        print(server.url, flush=True)
        await asyncio.sleep(1e6)


if __name__ == "__main__":
    asyncio.run(_main())
