"""The HTTP server: routes, status codes, access, request size.

`service.py` executes the requests. Routes are Starlette's plain ones; `bodies.py` reads the bodies and refuses bad ones
in one line.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from upshot.core.errors import UserError
from upshot.core.http_listener import listen, serve_app
from upshot.core.http_server import BodyRefused, CalmEnd, ClientGone, RequestGate, demand_key, while_connected
from upshot.sandbox.connection import KEY_VARIABLE
from upshot.sandbox.http.service import Service, describe_failure
from upshot.sandbox.local.pool import Sandbox
from upshot.sandbox.local.slots import Busy

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("upshot.sandbox")
MAX_REQUEST_BYTES = 16 << 20
READ_SECONDS = 60.0
"""Time limit for reading the body of a request, in seconds."""
DRAIN_SECONDS = 60
DESCRIPTORS_OF_A_RUN = 32
Verb = Callable[[Any], Awaitable[Any]]


def build_app(sandbox: Sandbox, api_key: str | None = None, max_bytes: int = MAX_REQUEST_BYTES) -> FastAPI:
    """The application; it opens the sandbox when it starts and closes it when it stops."""
    from fastapi import FastAPI

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        await sandbox.start()
        try:
            yield
        finally:
            await sandbox.aclose()

    app = FastAPI(title="Upshot sandbox", lifespan=life, openapi_url=None)
    _add_routes(app, Service(sandbox))

    def refuse(status: int, reason: str) -> Response:
        return _json({"error": reason}, status)

    app.add_middleware(RequestGate, key=api_key, max_bytes=max_bytes, read_s=READ_SECONDS, refuse=refuse)
    app.add_middleware(CalmEnd)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    from starlette.responses import PlainTextResponse

    sandbox = service.sandbox

    async def health(_: Request) -> Response:
        return _json(service.health())

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(sandbox.metrics.page(sandbox.running, sandbox.waiting, sandbox.count))

    async def session(request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "DELETE":
            return _json(await service.close_session(name))
        return await _answer(sandbox, lambda data: service.turn(name, data), request)

    verbs: dict[str, Verb] = {
        "/test_program": service.test_program,
        "/test_program_stdio": service.test_stdio,
        "/run_code": service.run_code,
        "/run": service.run,
        "/sessions": service.open_session,
    }

    for path, verb in verbs.items():
        app.add_route(path, functools.partial(_answer, sandbox, verb), methods=["POST"])
    app.add_route("/health", health, methods=["GET"])
    app.add_route("/metrics", metrics, methods=["GET"])
    app.add_route("/sessions/{name}", session, methods=["POST", "DELETE"])


async def _answer(sandbox: Sandbox, verb: Verb, request: Request) -> Response:
    """Run a verb, and turn an exception into a status and one clear line."""
    try:
        return _json(await while_connected(request.receive, verb(await _read_json(request))))
    except Busy as busy:
        sandbox.metrics.rejected += 1
        return _json({"error": str(busy)}, 429, {"Retry-After": str(int(busy.retry_after + 0.999))})
    except ClientGone:
        return _json({"error": "the client has hung up"}, 499)
    except BodyRefused:
        raise
    except Exception as error:
        status, reason = describe_failure(error)
        return _json({"error": reason}, status, {"Retry-After": "1"} if status == 503 else None)


async def _read_json(request: Request) -> Any:
    """A body, by the standard library: pydantic's reader refuses half a surrogate pair, which the program must see."""
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise UserError(f"this server cannot read the request's JSON: {error}"[:300]) from error


def _json(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(answer), status, headers, media_type="application/json")


def serve(sandbox: Sandbox, host: str, port: int, api_key: str | None, max_bytes: int = MAX_REQUEST_BYTES) -> None:
    """Serve until a signal; running programs are finished first."""
    demand_key(host, api_key, f"set {KEY_VARIABLE} or --api-key-file")
    with listen(host, port) as listener:
        asyncio.run(_serve(sandbox, listener, api_key, max_bytes))


async def _serve(sandbox: Sandbox, listener: socket.socket, api_key: str | None, max_bytes: int) -> None:
    await sandbox.start()  # before the server, so that a missing layer is one clear line
    try:
        app = build_app(sandbox, api_key, max_bytes)
        await serve_app(app, listener, DRAIN_SECONDS, DESCRIPTORS_OF_A_RUN * sandbox.count)
    finally:
        await sandbox.aclose()
