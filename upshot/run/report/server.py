"""The page over run folders while they are written: a local server that reads their files and nothing else.

It follows the logs in small slices between requests, so that a folder of any size opens at once and fills up;
server-sent events tell a page that there is more, and it asks for that. It writes nothing and knows nothing of the
runs' processes. Who may ask is `core/http_server.py`'s rule: this machine's programs, or whoever brings the token.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from upshot.core.http_listener import listen, serve_app
from upshot.core.http_server import CalmEnd, RequestGate, is_loopback
from upshot.run.report.page import dump, render
from upshot.run.report.report import ShownRun, ShownRuns

SLICE_S = 0.03
"""How long logs are read at a time while requests wait."""
POLL_S = 0.5
"""How often files are looked at when nothing was new."""
LOOK_S = 3.0
"""How often new run folders are looked for."""
BEAT_S = 15.0
"""How often a silent stream of events says that it is there."""
DRAIN_S = 1
COOKIE = "upshot_view"
TOKEN = re.compile(r"[\w-]{1,128}", re.ASCII)
"""What a token may be: nothing that could end a header."""
MAX_BODY = 1 << 16
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class RunWatch:
    """Follows the logs of some folders; `version` changes when a page should be drawn anew."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.shown = ShownRuns(roots)
        self.version = 0
        self._packed: tuple[int, str] = (-1, "")
        self._growing: set[str] = set()
        """Runs whose replies came faster than one look takes: their counts are sent when that is over."""

    async def run(self) -> None:
        """Follow until cancelled."""
        looked = time.monotonic()
        while True:
            busy = False
            for name, run in list(self.shown.runs.items()):
                head, replies = run.follow(SLICE_S)
                busy |= replies
                self.version += head or (name in self._growing and not replies)
                (self._growing.add if replies else self._growing.discard)(name)
                await asyncio.sleep(0)
            if time.monotonic() - looked > LOOK_S:
                before, looked = list(self.shown.runs), time.monotonic()
                self.shown.look()
                self.version += list(self.shown.runs) != before
            await asyncio.sleep(0 if busy else POLL_S)

    def page(self) -> str:
        """What the page shows but the replies, as JSON."""
        if self._packed[0] != self.version:
            self._packed = self.version, dump(self.shown.pack() | {"version": self.version})
        return self._packed[1]

    def state(self) -> dict[str, Any]:
        """What a page compares with what it has."""
        replies = {name: [run.replies.generation, len(run.replies)] for name, run in self.shown.runs.items()}
        return {"version": self.version, "replies": replies}

    async def events(self) -> AsyncIterator[str]:
        """The state, sent when it changes."""
        last, sent = None, 0.0
        while True:
            state = self.state()
            if state != last:
                last, sent = state, time.monotonic()
                yield f"data: {dump(state)}\n\n"
            elif time.monotonic() - sent > BEAT_S:
                sent = time.monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(POLL_S)


class TokenCookie:
    """ASGI middleware: a browser brings the token once, in the address, and from then on as a cookie."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Turn an address with a token into a cookie, and a cookie into the header that the gate asks for."""
        from starlette.requests import HTTPConnection
        from starlette.responses import RedirectResponse

        if scope["type"] == "http":
            asked = HTTPConnection(scope)
            token = asked.query_params.get("token", "")
            if scope["path"] == "/" and TOKEN.fullmatch(token):
                moved = RedirectResponse("/", 303)
                moved.set_cookie(COOKIE, token, httponly=True, samesite="strict")
                await moved(scope, receive, send)
                return
            if cookie := asked.cookies.get(COOKIE):
                scope = {**scope, "headers": [*scope["headers"], (b"x-api-key", cookie.encode(errors="replace"))]}
        await self.app(scope, receive, send)


def make_app(roots: Sequence[Path], token: str | None = None) -> Any:
    """The application over some folders."""
    from fastapi import FastAPI, HTTPException, Response
    from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse

    watch = RunWatch(roots)
    html = render("Upshot", None)

    @asynccontextmanager
    async def follow(_: Any) -> AsyncIterator[None]:
        following = asyncio.create_task(watch.run())
        yield
        following.cancel()

    app = FastAPI(lifespan=follow, docs_url=None, redoc_url=None, openapi_url=None)

    def run_of(name: str) -> ShownRun:
        if name not in watch.shown.runs:
            raise HTTPException(404, f"no run '{name}' here")
        return watch.shown.runs[name]

    def answer(text: str) -> Response:
        return Response(text, media_type="application/json", headers=HEADERS)

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(html, headers={**HEADERS, "X-Frame-Options": "DENY"})

    @app.get("/favicon.ico")
    async def icon() -> Response:
        return Response(status_code=204, headers=HEADERS)  # browsers ask; there is none

    @app.get("/page")
    async def data() -> Response:
        return answer(watch.page())

    @app.get("/replies")
    async def replies(run: str, start: int = 0, strings: int = 0) -> Response:
        return answer(dump(run_of(run).replies.chunk(max(0, start), max(0, strings))))

    @app.get("/reply")
    async def reply(run: str, at: int) -> Response:
        shown = run_of(run)
        if not 0 <= at < len(shown.replies):
            raise HTTPException(404, f"no reply {at} in '{run}'")
        return answer(dump(shown.reply(at)))

    @app.get("/find")
    async def find(run: str, words: str) -> Response:
        # In a thread: a long log takes a second, and the others need not wait for it.
        return answer(dump(await asyncio.to_thread(run_of(run).replies.find, words)))

    @app.get("/events")
    async def events() -> Response:
        return StreamingResponse(watch.events(), media_type="text/event-stream", headers=HEADERS)

    gate = RequestGate(app, token, MAX_BODY, 30.0, lambda status, why: PlainTextResponse(why, status))
    return CalmEnd(TokenCookie(gate))


def serve(roots: Sequence[Path], host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until a signal comes; `ready` gets its address, which beyond loopback holds a fresh token."""
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    app = make_app(roots, token)
    listener = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    ready(f"http://{name}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else ""))
    asyncio.run(serve_app(app, listener, DRAIN_S))
