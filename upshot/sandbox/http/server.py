"""The HTTP server: routes, who may come in, request size, queue. FastAPI outside, plain ASGI where all passes."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from upshot.core.errors import UserError
from upshot.core.http_server import CalmEnd, RequestGate, TooLarge, TooSlow, demand_key
from upshot.sandbox.connection import KEY_VARIABLE
from upshot.sandbox.http.doorkeeper import READ_SECONDS, connections_at_once, http_protocol
from upshot.sandbox.http.service import SandboxFault, Service
from upshot.sandbox.local.pool import Sandbox
from upshot.sandbox.local.slots import Busy

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("upshot.sandbox")
MAX_REQUEST_BYTES = 16 << 20
CLOSE = {"Connection": "close"}
"""For a request that was not read to its end: what follows on the line is not the next one."""
DRAIN_SECONDS = 60


class HungUp(Exception):
    """The client has hung up."""


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

    app = FastAPI(title="Upshot sandbox", lifespan=life, openapi_url=None)
    _add_routes(app, service)
    app.add_middleware(RequestGate, key=api_key, max_bytes=max_bytes, read_s=READ_SECONDS, refuse=_refused)
    app.add_middleware(CalmEnd)
    return app


def _refused(status: int, reason: str) -> Response:
    return _json({"error": reason}, status, CLOSE)


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
        answer = await _while_wanted(request, verb(await _body(request)))
        return answer if isinstance(answer, Response) else _json(answer)
    except Busy as busy:
        sandbox.metrics.rejected += 1
        return _json({"error": str(busy)}, 429, {"Retry-After": str(int(busy.retry_after + 0.999))})
    except SandboxFault as fault:
        return _json({"error": f"sandbox_fault: {fault}"}, 503, {"Retry-After": "1"})
    except HungUp:
        return _json({"error": "the client has hung up"}, 499)
    except TooLarge:
        return _json({"error": "the request is over the size limit"}, 413, CLOSE)
    except TooSlow:
        return _json({"error": f"the request did not arrive within {READ_SECONDS:.0f} s"}, 408, CLOSE)
    except UserError as error:
        return _json({"error": str(error)}, 400)
    except Exception as error:
        log.exception("a request failed")
        return _json({"error": f"internal error: {type(error).__name__}"}, 500)


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise UserError(f"the request is not JSON this server reads: {error}"[:300]) from error
    if not isinstance(body, dict):
        raise UserError("the request must be a JSON object")
    return body


async def _while_wanted(request: Request, work: Awaitable[Any]) -> Any:
    """The answer, unless the client hangs up: then the work is cancelled, for others wait behind it."""
    caller = asyncio.current_task()
    assert caller is not None
    hung_up = asyncio.ensure_future(request.receive())
    over = False

    def stop(_: asyncio.Future[Any]) -> None:
        if not over:
            caller.cancel()

    hung_up.add_done_callback(stop)
    try:
        return await work
    except asyncio.CancelledError:
        if hung_up.done() and caller.uncancel() == 0:
            raise HungUp from None
        raise
    finally:
        over = True
        hung_up.cancel()


def _json(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(answer), status, headers, media_type="application/json")


def serve(sandbox: Sandbox, host: str, port: int, api_key: str | None, max_bytes: int = MAX_REQUEST_BYTES) -> None:
    """Serve until a signal; running programs are finished first."""
    demand_key(host, api_key, f"set {KEY_VARIABLE} or --api-key-file")
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
            http=http_protocol(connections_at_once(sandbox.count)),
            ws="none",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            timeout_keep_alive=120,
        )
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        await sandbox.aclose()
