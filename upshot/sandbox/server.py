"""The HTTP server: routes, request size, key, queue limits. FastAPI outside, plain ASGI where every request passes."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from upshot.errors import UserError
from upshot.sandbox.pool import Sandbox
from upshot.sandbox.service import SandboxFault, Service
from upshot.sandbox.slots import Busy

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("upshot.sandbox")
MAX_REQUEST_BYTES = 16 << 20
LOOPBACK = ("127.0.0.1", "::1", "localhost")
DRAIN_SECONDS = 60


class TooLarge(Exception):
    """A request over the size limit."""


class Gate:
    """In front of every route: the API key and the size of what comes in."""

    def __init__(self, app: Any, api_key: str | None, max_bytes: int) -> None:
        self.app = app
        self.key = api_key.encode() if api_key else None
        self.max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self.key is not None and scope["path"] != "/health" and not self._authorised(headers):
            await _refuse(send, 401, {"error": "a key is needed: send 'Authorization: Bearer KEY'"})
            return
        if int(headers.get(b"content-length") or 0) > self.max_bytes:
            await _refuse(send, 413, {"error": f"the request is over the limit of {self.max_bytes} bytes"})
            return
        await self.app(scope, self._counting(receive), send)

    def _authorised(self, headers: dict[bytes, bytes]) -> bool:
        assert self.key is not None
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip() or headers.get(b"x-api-key", b"")
        return hmac.compare_digest(given, self.key)

    def _counting(self, receive: Any) -> Any:
        """Count a body that came without its length."""
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise TooLarge
            return message

        return counted


async def _refuse(send: Any, status: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def build_app(sandbox: Sandbox, api_key: str | None = None, max_bytes: int = MAX_REQUEST_BYTES) -> FastAPI:
    """The application; it opens the sandbox when it starts and closes it when it stops."""
    from fastapi import FastAPI

    service = Service(sandbox)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await sandbox.start()
        try:
            yield
        finally:
            await sandbox.aclose()

    app = FastAPI(title="Upshot sandbox", lifespan=life)
    _add_routes(app, service)
    app.add_middleware(Gate, api_key=api_key, max_bytes=max_bytes)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    """Plain Starlette routes: the service checks the bodies; validation of every field would cost more than a fork."""
    from starlette.responses import PlainTextResponse, StreamingResponse

    sandbox = service.sandbox

    async def health(_: Request) -> Response:
        return _json(service.health())

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(sandbox.metrics.render(sandbox.running, sandbox.waiting, sandbox.count))

    async def stream(body: dict[str, Any]) -> Response:
        return StreamingResponse(await service.batch(body), media_type="application/x-ndjson")

    async def session(request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "DELETE":
            return _json(await service.close_session(name))
        return await _guarded(sandbox, request, lambda body: service.turn(name, body))

    verbs: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
        "/test_program": service.test_program,
        "/test_program_stdio": service.test_stdio,
        "/run_code": service.run_code,
        "/run": service.run,
        "/submit": service.submit,
        "/batch": stream,
        "/sessions": service.open_session,
    }
    for path, verb in verbs.items():
        app.add_route(path, _endpoint(sandbox, verb), methods=["POST"])
    app.add_route("/health", health, methods=["GET"])
    app.add_route("/metrics", metrics, methods=["GET"])
    app.add_route("/sessions/{name}", session, methods=["POST", "DELETE"])


def _endpoint(
    sandbox: Sandbox, verb: Callable[[dict[str, Any]], Awaitable[Any]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await _guarded(sandbox, request, verb)

    return endpoint


async def _guarded(sandbox: Sandbox, request: Request, verb: Callable[[dict[str, Any]], Awaitable[Any]]) -> Response:
    """Run a verb and turn what goes wrong into a status and one clear line."""
    from starlette.responses import Response

    try:
        body = json.loads(await request.body())
        if not isinstance(body, dict):
            raise UserError("the request must be a JSON object")
        answer = await verb(body)
        return answer if isinstance(answer, Response) else _json(answer)
    except Busy as busy:
        sandbox.metrics.rejected += 1
        return _json({"error": str(busy)}, 429, {"Retry-After": str(int(busy.retry_after + 0.999))})
    except SandboxFault as fault:
        return _json({"error": f"sandbox_fault: {fault}"}, 503, {"Retry-After": "1"})
    except TooLarge:
        return _json({"error": "the request is over the size limit"}, 413)
    except UserError as error:
        return _json({"error": str(error)}, 400)
    except (ValueError, RecursionError) as error:
        return _json({"error": f"the request is not JSON this server reads: {error}"[:300]}, 400)


def _json(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(answer), status, headers, media_type="application/json")


def serve(sandbox: Sandbox, host: str, port: int, api_key: str | None, max_bytes: int = MAX_REQUEST_BYTES) -> None:
    """Serve until a signal; running programs are finished first."""
    if host not in LOOPBACK and not api_key:
        raise UserError(
            f"--host {host} is not loopback: set UPSHOT_SANDBOX_KEY or --api-key-file, or listen on 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=4096)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from error
    with listener:
        asyncio.run(_serve(sandbox, listener, api_key, max_bytes))


async def _serve(sandbox: Sandbox, listener: socket.socket, api_key: str | None, max_bytes: int) -> None:
    import uvicorn

    await sandbox.start()  # before the server, so that a missing layer is one clear line
    try:
        config = uvicorn.Config(
            build_app(sandbox, api_key, max_bytes),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            timeout_keep_alive=120,
        )
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        await sandbox.aclose()
