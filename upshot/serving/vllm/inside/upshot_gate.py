"""A gate before the routes of a vLLM server: `--middleware upshot_gate.WeightsGate`."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
from typing import Any

VERSION = b"x-upshot-version"
"""The header that names the version of the weights a request is for."""
SAMPLING = ("/v1/completions", "/v1/chat/completions")


class WeightsGate:
    """Lets a request through only while the weights that it is for are loaded; a server that has just started has none.

    Every route but /health also requires the key, because vLLM itself leaves the routes that change weights open.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.key = os.environ.get("VLLM_API_KEY", "")
        self.version: str | None = None
        """None: closed, because nothing has been loaded or a load is in progress."""
        self.busy = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] == "/health":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self.key and not hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self.key}".encode()):
            await answer(send, 401, {"error": {"message": "the policy's server requires the key of its run"}})
        elif scope["path"] == "/upshot/gate":
            await self._turn(scope, send)
        elif scope["path"] in SAMPLING:
            await self._pass(headers.get(VERSION, b"").decode(), scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _turn(self, scope: Any, send: Any) -> None:
        """GET: the state. POST: close, and wait until no request is in progress; POST ?version: open for it."""
        if scope["method"] == "POST":
            self.version = scope["query_string"].decode().removeprefix("version=") or None
            if self.version is None:
                await self.idle.wait()
        await answer(send, 200, {"version": self.version, "busy": self.busy})

    async def _pass(self, wanted: str, scope: Any, receive: Any, send: Any) -> None:
        if self.version is None or wanted != self.version:
            message = f"stale weights: version {wanted or 'none'} is requested, {self.version or 'none'} is loaded"
            await answer(send, 409, {"error": {"message": message}})
            return
        self.busy += 1
        self.idle.clear()
        try:
            await self.app(scope, receive, send)
        finally:
            self.busy -= 1
            if not self.busy:
                self.idle.set()


async def answer(send: Any, status: int, body: dict[str, Any]) -> None:
    """Send a JSON body."""
    raw = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
