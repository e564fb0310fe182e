"""Any OpenAI-compatible endpoint over HTTP: chat completions for messages, completions for token ids.

About half a millisecond of CPU a call (`core/http_client.py`). Training does not stream; `upshot chat` does (`stream`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Unpack

from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError, did_you_mean
from upshot.core.http_client import AttemptError, HttpClient, RetryPolicy, error_detail
from upshot.models.base import Abilities, Completion, ModelCallError, Request
from upshot.models.client.guarded import GuardedModel, Guards
from upshot.models.openai_format import (
    ApiAnswer,
    BadResponse,
    MissingScores,
    chat_body,
    completion_body,
    read_answer,
    read_scores,
    read_stream,
    score_body,
)

log = logging.getLogger(__name__)

ID_SERVERS = ("vllm", "upshot")
"""Owners, as their model lists name them, that answer `return_token_ids`."""


class _BadRequest(Exception):
    """The endpoint does not take this body; perhaps it takes another."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.too_long = any(word in detail for word in ("context", "too long", "maximum"))
        self.failure = ModelCallError("too_long" if self.too_long else f"http_{status}", detail)


class EndpointModel(GuardedModel):
    """A model behind a URL."""

    def __init__(self, spec: ModelSpec, **guards: Unpack[Guards]) -> None:
        super().__init__(spec, **guards)
        self.served = spec.model
        ids, schema = bool(spec.token_ids), spec.structured is not False
        self.abilities = Abilities(ids_in=True, ids_out=ids, schema=schema, tools=True, scores=ids)
        self.headers: dict[str, str] = {}
        """Sent with every request beside those of the spec."""
        self._length_field = "max_tokens"
        self._client: HttpClient | None = None

    @property
    def identity(self) -> str:
        """Endpoint and served name."""
        return f"{self.spec.url}#{self.served}"

    async def start(self) -> None:
        """Check key, address and served name by the endpoint's model list; endpoints without one are not checked."""
        await super().start()
        check_price(self)
        if self._client is None:
            url, headers, proxies = str(self.spec.url), headers_of(self.spec), not self.spec.on_this_machine
            retry = RetryPolicy(self.spec.retries, self.spec.backoff_s)
            # The endpoint's slots bound the connections, so the client itself does not.
            self._client = HttpClient(url, headers=headers, timeout_s=self.spec.timeout_s, retry=retry, proxies=proxies)
        try:
            await self._look_up(self._client)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Abort the calls in flight and close the connections."""
        await super().aclose()
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _look_up(self, client: HttpClient) -> None:
        """Read the model list: reachable? served? able to return ids?"""
        try:
            answer, _ = await client.request("GET", "/models", timeout_s=min(10.0, self.spec.timeout_s))
            listed = answer.get("data")
        except AttemptError as error:
            if error.status in (401, 403):
                raise self._key_error(error.status) from None
            if error.reason in ("connection", "timeout"):
                raise UserError(
                    f"cannot reach {self.spec.url} ({error.detail}); is the server running, and is this its "
                    "address up to and including '/v1'?"
                ) from error
            listed = None  # an endpoint without a list
        entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        owners = {str(entry.get("id")): str(entry.get("owned_by", "")) for entry in entries}
        if not self.served:
            if len(owners) != 1:
                names = f"serves {', '.join(sorted(owners))}" if owners else "does not list its models"
                raise UserError(f"{self.spec.url} {names}; name one in 'model'")
            self.served = next(iter(owners))
        if owners and self.served not in owners:
            warn_unlisted(str(self.spec.url), self.served, tuple(sorted(owners)))
        if self.spec.token_ids is None and owners.get(self.served) in ID_SERVERS:
            self.abilities = replace(self.abilities, ids_out=True, seed=True, scores=True)

    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        if request.given:
            return await self._score(request)
        if request.by_ids:
            path, body = "/completions", completion_body(request, n, seed, self.abilities.ids_out)
        else:
            path, body = "/chat/completions", chat_body(request, n, seed, self.abilities.schema, self.abilities.ids_out)
        try:
            return await self._send(path, body)
        except _BadRequest as refusal:
            if "max_completion_tokens" in refusal.detail and self._length_field == "max_tokens":
                self._length_field = "max_completion_tokens"
                return await self._attempt(request, n, seed)
            if "response_format" not in body or self.spec.structured is not None or refusal.too_long:
                raise refusal.failure from None
            del body["response_format"]
        try:
            answer = await self._send(path, body)
        except _BadRequest as refusal:  # so it was not the schema
            raise refusal.failure from None
        self.abilities = replace(self.abilities, schema=False)
        return answer

    async def stream(self, request: Request, hear: Callable[[str], None]) -> Completion:
        """One completion of a chat, passed to `hear` as it arrives, without retries; a thought in a separate field gets
        markers."""
        if self._client is None:
            raise ModelCallError("closed", f"model '{self.name}' is not started")
        request = replace(request, sampling=self.spec.sampling(request.sampling))
        body = chat_body(request, 1, request.sampling.seed, False, False) | {"stream": True}
        events = self._client.events("/chat/completions", self._complete_body(body), self.headers)
        return await read_stream(events, hear)

    async def _score(self, request: Request) -> ApiAnswer:
        """Ask once for the log-probabilities of given ids."""
        price = self.spec.price_in or 0.0
        try:
            return await self._send("/completions", score_body(request), lambda data: read_scores(data, request, price))
        except _BadRequest as refusal:
            if refusal.too_long or not any(word in refusal.detail for word in ("echo", "logprobs", "max_tokens")):
                raise refusal.failure from None
            trouble = refusal.detail
        except MissingScores as error:
            trouble = str(error)
        raise UserError(
            f"'{self.name}' does not report the log-probabilities of given ids ({trouble}); it must answer `echo` with "
            "`logprobs` and `max_tokens: 0`, as vLLM and upshot serve do"
        )

    async def _send(self, path: str, body: dict[str, Any], read: Callable[[Any], ApiAnswer] | None = None) -> ApiAnswer:
        if self._client is None:
            raise ModelCallError("closed", f"model '{self.name}' is not started")
        answer = await self._client.send("POST", path, self._complete_body(body), headers=self.headers)
        if answer.status in (400, 413, 422):
            raise _BadRequest(answer.status, error_detail(answer.raw))
        if answer.status != 200:
            raise self._failure(answer.failure())
        try:
            data = answer.json_object()
            return read(data) if read else read_answer(data, self.spec.price_in or 0.0, self.spec.price_out or 0.0)
        except BadResponse as error:
            raise answer.unreadable(error) from error

    def _complete_body(self, body: dict[str, Any]) -> dict[str, Any]:
        body = {**body, "model": self.served}
        if self._length_field != "max_tokens":
            body[self._length_field] = body.pop("max_tokens")
        body |= self.spec.extra_body
        return {field: value for field, value in body.items() if field not in self.spec.omit}

    def _failure(self, error: AttemptError) -> Exception:
        """What an answer's status means for the call."""
        if error.status == 429 and "insufficient_quota" in error.detail:
            return UserError(f"the quota at {self.spec.url} is used up: {error.detail}")
        if error.passing:
            return error
        if error.status in (401, 403):
            return self._key_error(error.status)
        if error.status == 404:
            known = f"does not know the model '{self.served}' or this route (HTTP 404: {error.detail})"
            return UserError(f"{self.spec.url} {known}")
        return ModelCallError(error.reason, error.detail)

    def _key_error(self, status: int) -> UserError:
        variable = key_variable(self.spec)
        way_out = f"is the key in ${variable} right?" if variable else "name the variable with the key: api_key_env"
        return UserError(f"{self.spec.url} rejects the request (HTTP {status}); {way_out}")


@lru_cache  # once, however often a model is started
def warn_unlisted(url: str, served: str, listed: tuple[str, ...]) -> None:
    """Warn about a name that an endpoint does not list: some endpoints serve models they do not list, most do not."""
    log.warning("%s does not list the model '%s'; %s", url, served, did_you_mean(served, listed[:20]))


def key_variable(spec: ModelSpec) -> str | None:
    """The environment variable that holds the endpoint's key; None: it needs none."""
    if spec.api_key_env:
        return spec.api_key_env
    return "OPENAI_API_KEY" if "//api.openai.com" in (spec.url or "") else None


def headers_of(spec: ModelSpec) -> dict[str, str]:
    """Headers with secrets from the environment; a missing variable is a `UserError`."""
    variable = key_variable(spec)
    for name in filter(None, [variable, *spec.headers_env.values()]):
        if not os.environ.get(name):
            raise UserError(f"model '{spec.label}' needs the environment variable {name}, which is not set")
    key = {"Authorization": f"Bearer {os.environ[variable]}"} if variable else {}
    return key | {header: os.environ[name] for header, name in spec.headers_env.items()}


def check_price(model: GuardedModel) -> None:
    """Refuse a dollar budget for a model without a known price."""
    spec = model.spec
    unknown = spec.price_in is None or spec.price_out is None
    if model.budget.max_dollars is not None and unknown and not spec.on_this_machine:
        raise UserError(
            f"a budget in dollars needs the price of '{spec.label}': set price_in and price_out (dollars per million "
            "tokens; 0 if it is free)"
        )
