"""The scorer behind `remote`: a small HTTP server around another manager. `POST /verify`, `GET /health`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from upshot.core.errors import UserError
from upshot.core.http_server import refusal
from upshot.rewards.workers.base import Manager
from upshot.tasks.verifiers.base import Claim

MAX_BODY = 64 * 2**20
KEY_VARIABLE = "UPSHOT_SCORER_KEY"
"""Where the scorer and those who ask it find the key."""
OWN = ("judge", "sandbox", "models")
"""What verifiers are given by the program, never by a claim."""


def scorer_app(manager: Manager, api_key: str | None = None) -> Any:
    """An aiohttp application that verifies claims with a manager and closes it when it stops."""
    from aiohttp import web

    @web.middleware
    async def admit(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        refused = refusal(request.method, request.path, request.headers.get, api_key)
        if refused is not None:
            return web.json_response({"error": refused[1]}, status=refused[0])
        return await handler(request)

    async def verify(request: web.Request) -> web.Response:
        try:
            claim = _claim(await request.json())
        except UserError as error:
            return web.json_response({"error": str(error)}, status=422)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return web.json_response({"error": f"not a claim: {error!r}"[:500]}, status=400)
        try:
            score = await manager.verify(claim)
        except UserError as error:
            return web.json_response({"error": str(error)}, status=422)
        return web.json_response({"value": score.value, "reason": score.reason, "detail": dict(score.detail)})

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", **manager.stats()})

    async def close(_: web.Application) -> None:
        await manager.aclose()

    app = web.Application(client_max_size=MAX_BODY, middlewares=[admit])
    app.add_routes([web.post("/verify", verify), web.get("/health", health)])
    app.on_cleanup.append(close)
    return app


def _claim(data: Any) -> Claim:
    """The claim of a request, which may name nothing of this machine's."""
    extra, options = data.get("extra") or {}, data.get("options") or {}
    if not isinstance(extra, dict) or not isinstance(options, dict):
        raise TypeError("extra and options must be objects")
    claim = Claim(str(data["source"]), str(data["response"]), data.get("reference"), extra, options)
    # A path would let a stranger import any module of this machine: only known names are served.
    if ":" in claim.source:
        raise UserError(f"verifier '{claim.source}' is a path; a scorer serves registered names only")
    for name in OWN:
        if name in options:
            raise UserError(f"option '{name}' is the scorer's own; it was chosen when the scorer was started")
    return claim
