"""Endpoints through other people's clients: the errors of `openai` and litellm, read as ours.

Both raise the `openai` package's exception classes, and both answer with objects that dump to OpenAI's wire format.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from dataclasses import replace
from typing import Any

from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError
from upshot.models.base import Abilities, ModelCallError, Request
from upshot.models.client.budget import Budget
from upshot.models.client.guarded import AttemptFailed, GuardedModel
from upshot.models.client.limits import EndpointLimits, retry_after
from upshot.models.openai_format import ApiAnswer, BadResponse, RefusedAnswer, chat_body, read_answer


class LibraryModel(GuardedModel):
    """A chat endpoint called through a client library, whose own retries are switched off."""

    def __init__(
        self, spec: ModelSpec, *, role: str = "", budget: Budget | None = None, limits: EndpointLimits | None = None
    ) -> None:
        super().__init__(spec, role=role, budget=budget, limits=limits)
        self.abilities = Abilities(schema=spec.structured is not False, tools=True)
        self.price_in, self.price_out = spec.price_in or 0.0, spec.price_out or 0.0

    async def start(self) -> None:
        """Check that the served model is named; only our own client looks it up."""
        await super().start()
        if not self.spec.model:
            raise UserError(f"name the model that {self.spec.url} serves: '{self.spec.url}#name'")

    @abstractmethod
    async def _create(self, body: dict[str, Any]) -> Any:
        """Send a chat completion; the library's response object."""

    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        body = chat_body(request, n, seed, self.abilities.schema, ids=False)
        for field in self.spec.omit:
            body.pop(field, None)
        try:
            async with asyncio.timeout(self.spec.timeout_s):
                response = await self._create(body)
        except TimeoutError as error:
            raise AttemptFailed("timeout", f"no answer within {self.spec.timeout_s:g} s") from error
        except (ModelCallError, UserError):
            raise
        except Exception as error:  # the libraries' own classes, told apart by name and status
            if self._learn(body, error):
                return await self._attempt(request, n, seed)
            failure = failure_of(error, self.name)
            if failure is error:
                raise
            raise failure from error
        try:
            return read_answer(response.model_dump(), self.price_in, self.price_out)
        except BadResponse as error:
            raise AttemptFailed("bad_response", str(error)) from error
        except RefusedAnswer as error:
            raise ModelCallError("refused", str(error)) from error

    def _learn(self, body: dict[str, Any], error: Exception) -> bool:
        """Whether the endpoint refused the schema; it is not sent again."""
        refused = getattr(error, "status_code", None) in (400, 422) and "response_format" in body
        named = any(word in str(error) for word in ("response_format", "json_schema", "schema"))
        if not refused or not named or self.spec.structured is not None:
            return False
        self.abilities = replace(self.abilities, schema=False)
        return True


def failure_of(error: Exception, name: str) -> Exception:
    """Our exception for one of the `openai` package's classes (litellm's derive from them); others pass unchanged."""
    import openai

    detail = " ".join(str(error).split())[:300]
    if isinstance(error, openai.APITimeoutError):
        return AttemptFailed("timeout", detail)
    if isinstance(error, openai.RateLimitError):
        if "insufficient_quota" in detail:
            return UserError(f"the quota of '{name}' is used up: {detail}")
        headers = getattr(getattr(error, "response", None), "headers", None) or {}
        return AttemptFailed("rate_limited", detail, retry_after(headers.get("retry-after")))
    if isinstance(error, (openai.AuthenticationError, openai.PermissionDeniedError)):
        return UserError(f"'{name}' refuses our key: {detail}")
    if isinstance(error, openai.NotFoundError):
        return UserError(f"'{name}' is not known there: {detail}")
    status = getattr(error, "status_code", None)
    if isinstance(error, openai.APIStatusError) and isinstance(status, int) and 400 <= status < 500:
        return ModelCallError("too_long" if "context" in detail else f"http_{status}", detail)
    if isinstance(error, openai.APIConnectionError):
        return AttemptFailed("connection", detail)
    if isinstance(error, openai.APIStatusError):
        return AttemptFailed(f"http_{status}", detail)
    if isinstance(error, (openai.APIError, ValueError)):  # a body that is no JSON
        return AttemptFailed("bad_response", detail)
    return error
