"""The scorer behind `remote`: a small HTTP server around another manager. `POST /verify`, `GET /health`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from upshot.core.errors import UserError
from upshot.core.http_server import CalmEnd, ClientGone, RequestGate, while_connected
from upshot.rewards.workers.base import Manager
from upshot.tasks.verifiers.base import Claim

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MAX_BYTES = 16 << 20
"""Most bytes of a claim."""
READ_S = 60.0
"""Most seconds until a claim is read."""
KEY_VARIABLE = "UPSHOT_SCORER_KEY"
"""Where the scorer and those who ask it find the key."""
OWN = ("judge", "sandbox", "models", "verdicts")
"""What verifiers are given by the program, never by a claim."""


def scorer_app(manager: Manager, api_key: str | None = None) -> Starlette:
    """An application that verifies claims with a manager and closes it when it stops."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Route

    async def verify(request: Request) -> Response:
        try:
            claim = _claim(await request.body())
            score = await while_connected(request.receive, manager.verify(claim))
        except UserError as error:
            return _json({"error": str(error)}, 422)
        except NoClaim as error:
            return _json({"error": f"not a claim: {error}"[:500]}, 400)
        except ClientGone:
            return _json({"error": "the client has hung up"}, 499)
        return _json({"value": score.value, "reason": score.reason, "detail": dict(score.detail)})

    async def health(_: Request) -> Response:
        return _json({"status": "ok", **manager.stats()})

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await manager.aclose()

    def refuse(status: int, reason: str) -> Response:
        return _json({"error": reason}, status)

    gate = Middleware(RequestGate, key=api_key, max_bytes=MAX_BYTES, read_s=READ_S, refuse=refuse)
    routes = [Route("/verify", verify, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, middleware=[Middleware(CalmEnd), gate], lifespan=life)


class NoClaim(Exception):
    """A body that is not a claim."""


def _json(answer: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(answer), status, media_type="application/json")


def _claim(raw: bytes) -> Claim:
    """The claim of a request, which may name nothing of this machine's."""
    try:
        data = json.loads(raw)
        extra, options = data.get("extra") or {}, data.get("options") or {}
        if not isinstance(extra, dict) or not isinstance(options, dict):
            raise TypeError("extra and options must be objects")
        claim = Claim(str(data["source"]), str(data["response"]), data.get("reference"), extra, options)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NoClaim(repr(error)) from error
    # A path would let a stranger import any module of this machine: only known names are served.
    if ":" in claim.source:
        raise UserError(f"verifier '{claim.source}' is a path; a scorer serves registered names only")
    for name in OWN:
        if name in options:
            raise UserError(f"option '{name}' is set when the scorer is started; a request cannot choose it")
    return claim
