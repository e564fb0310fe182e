"""Behind HTTP: a scorer elsewhere (`upshot verify --serve`). Pooled connections, retries, per-item failure."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from upshot.config.bounds import Address, Count, NonNegative, Positive, Whole
from upshot.core.errors import UserError
from upshot.core.http_client import AttemptError, HttpClient, RetryPolicy
from upshot.core.score import Reason, Score
from upshot.rewards.workers.base import Manager, managers
from upshot.rewards.workers.scorer import KEY_VARIABLE
from upshot.tasks.verifiers.base import Claim


@managers.register("remote")
class RemoteManager(Manager):
    """POSTs each claim to `url`/verify; retries what may pass.

    The scorer's key, where it wants one, comes from UPSHOT_SCORER_KEY.
    """

    def __init__(
        self,
        url: Address,
        seconds: Positive = 60.0,
        connections: Count = 32,
        retries: Whole = 3,
        backoff: NonNegative = 0.5,
        **context: Any,
    ) -> None:
        super().__init__(**context)
        key, retry = os.environ.get(KEY_VARIABLE), RetryPolicy(retries, backoff)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = HttpClient(url, headers=headers, timeout_s=seconds, connections=connections, retry=retry)
        self.counts.update({"items": 0, "retries": 0, "failures": 0})

    async def verify(self, claim: Claim) -> Score:
        """The score of one claim, as the remote scorer gives it."""
        self.counts["items"] += 1
        try:
            data, _ = await self._client.request("POST", "/verify", asdict(claim), on_retry=self._count_retry)
            return Score(data["value"], data.get("reason"), data.get("detail") or {})
        except AttemptError as error:
            where = f"the scorer at {self._client.url}"
            if error.status == 422:
                raise UserError(f"{where} refused the request: {error.detail}") from error
            if error.status in (401, 403):
                raise UserError(f"{where} requires a key: set {KEY_VARIABLE} to the one it was started with") from error
            self.counts["failures"] += 1
            return Score.missing(Reason.read(error.reason), f"remote: {error.reason}")
        except (KeyError, TypeError, ValueError):
            self.counts["failures"] += 1
            return Score.missing(Reason.BAD_RESPONSE, "remote: bad response")

    def _count_retry(self, _: AttemptError) -> None:
        self.counts["retries"] += 1

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
