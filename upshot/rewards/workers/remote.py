"""Behind HTTP: a scorer elsewhere (`upshot verify --serve`). Pooled connections, retries, per-item failure."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from typing import Any

from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.core.time_limit import uncounted
from upshot.rewards.workers.base import Manager, managers
from upshot.rewards.workers.scorer import KEY_VARIABLE
from upshot.tasks.verifiers.base import Claim


@managers.register("remote")
class RemoteManager(Manager):
    """POSTs each claim to `url`/verify; retries what may pass (connection, 429, 5xx) with jittered backoff.

    The scorer's key, where it wants one, comes from UPSHOT_SCORER_KEY.
    """

    def __init__(
        self,
        url: str,
        seconds: float = 60.0,
        connections: int = 32,
        retries: int = 3,
        backoff: float = 0.5,
        **context: Any,
    ) -> None:
        super().__init__(**context)
        self.url = url.rstrip("/")
        self.seconds = seconds
        self.connections = connections
        self.retries = retries
        self.backoff = backoff
        self._session: Any = None
        self._counts = {"items": 0, "retries": 0, "failures": 0}

    @uncounted
    async def verify(self, claim: Claim) -> Score:
        """The score of one claim, as the remote scorer gives it."""
        self._counts["items"] += 1
        reason = ""
        for attempt in range(self.retries + 1):
            if attempt:
                self._counts["retries"] += 1
                await asyncio.sleep(self.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            score, reason = await self._post(claim)
            if score is not None:
                return score
        self._counts["failures"] += 1
        return Score.missing(Reason.read(reason), f"remote: {reason}")

    async def _post(self, claim: Claim) -> tuple[Score | None, str]:
        import aiohttp

        body = {
            "source": claim.source,
            "response": claim.response,
            "reference": claim.reference,
            "extra": dict(claim.extra),
            "options": dict(claim.options),
        }
        try:
            async with self._connected().post(f"{self.url}/verify", json=body) as answer:
                if answer.status == 422:
                    raise UserError(f"the scorer at {self.url} refused the claim: {(await answer.json())['error']}")
                if answer.status in (401, 403):
                    raise UserError(f"the scorer at {self.url} wants a key: set {KEY_VARIABLE} to the one it was given")
                if answer.status in (429, 500, 502, 503, 504):
                    return None, f"http_{answer.status}"
                if answer.status != 200:
                    return Score.missing(Reason.HTTP_ERROR, f"remote: http_{answer.status}"), ""
                data = await answer.json()
                return Score(data["value"], data.get("reason"), data.get("detail") or {}), ""
        except TimeoutError:
            return None, "timeout"
        except aiohttp.ClientError:
            return None, "connection"
        except (KeyError, TypeError, ValueError):
            return Score.missing(Reason.BAD_RESPONSE, "remote: bad response"), ""

    def _connected(self) -> Any:
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self.connections)
            timeout = aiohttp.ClientTimeout(total=self.seconds)
            key = os.environ.get(KEY_VARIABLE)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        return self._session

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def stats(self) -> dict[str, float]:
        """Items, retries, failures."""
        return {f"verifier_{name}": float(n) for name, n in self._counts.items()}

    def state(self) -> dict[str, Any]:
        """The counters."""
        return dict(self._counts)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self._counts |= state
