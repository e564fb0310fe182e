"""`provider/model` through litellm, which is imported only if it is used; keys come from the environment.

litellm's own retries are switched off, because ours are counted and respect the limits. Its errors derive from the
classes of the `openai` package, and its answers can be dumped in OpenAI's format; we convert both to our own.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError, import_optional
from upshot.core.files import suggest_neighbour
from upshot.core.http_client import AttemptError, retry_after
from upshot.models.base import Abilities, ModelCallError, Request
from upshot.models.client.guarded import GuardedModel, Guards
from upshot.models.endpoint import headers_of, key_variable
from upshot.models.openai_format import ApiAnswer, BadResponse, chat_body, read_answer


class LiteLLMModel(GuardedModel):
    """A model at a provider; also any URL with `via: litellm`."""

    def __init__(self, spec: ModelSpec, **guards: Unpack[Guards]) -> None:
        super().__init__(spec, **guards)
        self.abilities = Abilities(schema=spec.structured is not False, tools=True)
        self.price_in, self.price_out = spec.price_in or 0.0, spec.price_out or 0.0

    async def start(self) -> None:
        """Import litellm, check provider, key and price; raises `UserError` before any work."""
        await super().start()
        if not self.spec.model:
            raise UserError(f"name the model that {self.spec.url} serves: '{self.spec.url}#name'")
        name = self._full_name()
        nearest = suggest_neighbour(Path(name))
        if nearest and not self.spec.url and any(Path(name).parent.glob("*/recipe.yaml")):  # a folder of runs
            raise UserError(f"model '{name}': there is no such folder{nearest}")
        litellm = import_litellm()
        try:
            litellm.get_llm_provider(name)
        except litellm.BadRequestError as error:
            raise UserError(
                f"model '{name}': there is no such folder here, and litellm has no provider '{name.split('/')[0]}'; "
                "give the path of a run or model folder, 'provider/model' such as 'openai/gpt-4o-mini', or "
                f"'local:{name}' for a model of the Hugging Face hub in this process"
            ) from error
        headers_of(self.spec)
        if self.spec.url is None and self.spec.api_key_env is None:
            missing = litellm.validate_environment(name)["missing_keys"]
            if missing:
                raise UserError(f"model '{name}' needs {' and '.join(missing)} in the environment; set it there")
        self._find_price(litellm, name)

    def _full_name(self) -> str:
        return f"openai/{self.spec.model}" if self.spec.url else self.spec.model

    def _find_price(self, litellm: Any, name: str) -> None:
        """List prices from litellm's table, if the spec states none."""
        spec = self.spec
        if spec.price_in is not None and spec.price_out is not None:
            return
        try:
            dollars_in, dollars_out = litellm.cost_per_token(
                model=name, prompt_tokens=1_000_000, completion_tokens=1_000_000
            )
        except Exception as error:  # litellm raises bare exceptions for models without a price
            if self.budget.max_dollars is not None and not spec.on_this_machine:
                raise UserError(
                    f"a budget in dollars needs the price of '{name}', which litellm does not know: set price_in and "
                    "price_out (dollars per million tokens)"
                ) from error
            return
        self.price_in = dollars_in if spec.price_in is None else spec.price_in
        self.price_out = dollars_out if spec.price_out is None else spec.price_out

    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        whole = chat_body(request, n, seed, self.abilities.schema, ids=False)
        body = {field: value for field, value in whole.items() if field not in self.spec.omit}
        try:
            async with asyncio.timeout(self.spec.timeout_s):
                response = await self._create(body)
        except TimeoutError as error:
            raise AttemptError("timeout", f"no answer within {self.spec.timeout_s:g} s") from error
        except Exception as error:  # the libraries' own classes; `failure_of` sorts them by name and status
            if self._learn(body, error):
                return await self._attempt(request, n, seed)
            failure = failure_of(error, self.name)
            if failure is error:
                raise
            raise failure from error
        try:
            return read_answer(response.model_dump(), self.price_in, self.price_out)
        except BadResponse as error:
            raise AttemptError("bad_response", str(error)) from error

    def _learn(self, body: dict[str, Any], error: Exception) -> bool:
        """Whether the endpoint refused the schema; then it is not sent again."""
        refuses_body = getattr(error, "status_code", None) in (400, 422) and "response_format" in body
        names_schema = any(word in str(error) for word in ("response_format", "json_schema", "schema"))
        if not refuses_body or not names_schema or self.spec.structured is not None:
            return False
        self.abilities = replace(self.abilities, schema=False)
        return True

    async def _create(self, body: dict[str, Any]) -> Any:
        litellm = import_litellm()
        variable = key_variable(self.spec)
        options: dict[str, Any] = {"num_retries": 0, "max_retries": 0, "drop_params": True}
        if self.spec.url:
            options |= {"api_base": self.spec.url, "api_key": "none"}
        if variable:
            options["api_key"] = os.environ[variable]
        if self.spec.headers_env:
            options["extra_headers"] = {name: os.environ[var] for name, var in self.spec.headers_env.items()}
        if self.spec.extra_body:
            options["extra_body"] = self.spec.extra_body
        return await litellm.acompletion(model=self._full_name(), timeout=self.spec.timeout_s, **body, **options)


def failure_of(error: Exception, name: str) -> Exception:
    """Our exception for one of the `openai` package's classes (litellm's derive from them); others pass unchanged."""
    import openai

    detail = " ".join(str(error).split())[:300]
    if isinstance(error, openai.APITimeoutError):
        return AttemptError("timeout", detail)
    if isinstance(error, openai.RateLimitError):
        if "insufficient_quota" in detail:
            return UserError(f"the quota of '{name}' is used up: {detail}")
        headers = getattr(getattr(error, "response", None), "headers", None) or {}
        return AttemptError("rate_limited", detail, retry_after(headers.get("retry-after")))
    if isinstance(error, (openai.AuthenticationError, openai.PermissionDeniedError)):
        return UserError(f"'{name}' rejects the API key: {detail}")
    if isinstance(error, openai.NotFoundError):
        return UserError(f"'{name}' is unknown to the provider: {detail}")
    status = getattr(error, "status_code", None)
    if isinstance(error, openai.APIStatusError) and isinstance(status, int) and 400 <= status < 500:
        return ModelCallError("too_long" if "context" in detail else f"http_{status}", detail)
    if isinstance(error, openai.APIConnectionError):
        return AttemptError("connection", detail)
    if isinstance(error, openai.APIStatusError):
        return AttemptError(f"http_{status}", detail)
    if isinstance(error, (openai.APIError, ValueError)):  # a body that is not JSON
        return AttemptError("bad_response", detail)
    return error


def import_litellm() -> Any:
    """litellm, quiet and with the price table it was installed with (it would fetch one at import)."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    way_out = "pip install litellm (an OpenAI-compatible URL needs no extra package)"
    litellm = import_optional("litellm", f"a 'provider/model' is called through litellm: {way_out}")
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    logging.getLogger("LiteLLM").setLevel(logging.WARNING)
    return litellm
