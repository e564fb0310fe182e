"""An OpenAI-compatible endpoint through the official `openai` client (`via: openai`), or a client you configured."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError
from upshot.models.client.budget import Budget
from upshot.models.client.limits import EndpointLimits
from upshot.models.endpoint import check_price, headers_of, key_variable
from upshot.models.library_client import LibraryModel

if TYPE_CHECKING:
    from openai import AsyncOpenAI

STANDARD = {
    "messages",
    "max_tokens",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "n",
    "response_format",
    "tools",
    "logprobs",
}
"""Fields that the client takes by name; all others travel in its `extra_body`."""


class OpenAIClientModel(LibraryModel):
    """A model behind `AsyncOpenAI`; give your own client (Azure's, say) as `client`, and it stays yours to close."""

    def __init__(
        self,
        spec: ModelSpec,
        client: AsyncOpenAI | None = None,
        *,
        role: str = "",
        budget: Budget | None = None,
        limits: EndpointLimits | None = None,
    ) -> None:
        super().__init__(spec, role=role, budget=budget, limits=limits)
        self._given = client
        self._client = client

    async def start(self) -> None:
        """Open the client; a missing key or package is a `UserError`."""
        await super().start()
        check_price(self)
        if self._client is not None:
            return
        try:
            import openai
        except ImportError as error:
            raise UserError("'via: openai' needs the package openai: pip install openai") from error
        headers = headers_of(self.spec)
        headers.pop("Authorization", None)
        variable = key_variable(self.spec)
        self._client = openai.AsyncOpenAI(
            base_url=self.spec.url,
            api_key=os.environ[variable] if variable else "none",
            max_retries=0,
            timeout=self.spec.timeout_s,
            default_headers=headers,
        )

    async def _create(self, body: dict[str, Any]) -> Any:
        if self._client is None:
            raise UserError(f"model '{self.name}' is not started")
        named = {key: value for key, value in body.items() if key in STANDARD}
        extra = {key: value for key, value in body.items() if key not in STANDARD} | self.spec.extra_body
        return await self._client.chat.completions.create(model=self.spec.model, **named, extra_body=extra or None)

    async def aclose(self) -> None:
        """Close the connections of a client that we opened."""
        await super().aclose()
        client, self._client = self._client, self._given
        if client is not None and client is not self._given:
            await client.close()
