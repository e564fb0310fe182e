"""The scorer behind `remote`: a small HTTP server around another manager. `POST /verify`, `GET /health`."""

from __future__ import annotations

import json
from typing import Any

from upshot.errors import UserError
from upshot.rewards.managers.base import Manager
from upshot.verifiers.base import Claim

MAX_BODY = 64 * 2**20


def scorer_app(manager: Manager) -> Any:
    """An aiohttp application that verifies claims with a manager and closes it when it stops."""
    from aiohttp import web

    async def verify(request: web.Request) -> web.Response:
        try:
            data = await request.json()
            claim = Claim(
                str(data["source"]),
                str(data["response"]),
                data.get("reference"),
                data.get("extra") or {},
                data.get("options") or {},
            )
            # A path would let a stranger import any module of this machine: only known names are served.
            if ":" in claim.source:
                raise UserError(f"verifier '{claim.source}' is a path; a scorer serves registered names only")
            score = await manager.verify(claim)
        except UserError as error:
            return web.json_response({"error": str(error)}, status=422)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            return web.json_response({"error": f"not a claim: {error!r}"}, status=400)
        return web.json_response({"value": score.value, "reason": score.reason, "detail": dict(score.detail)})

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", **manager.stats()})

    async def close(_: web.Application) -> None:
        await manager.aclose()

    app = web.Application(client_max_size=MAX_BODY)
    app.add_routes([web.post("/verify", verify), web.get("/health", health)])
    app.on_cleanup.append(close)
    return app
