"""`provider/model` through litellm, which is imported only then; keys come from the environment."""

from __future__ import annotations

import logging
import os
from typing import Any

from upshot.core.errors import UserError
from upshot.models.endpoint import headers_of, key_variable
from upshot.models.library_client import LibraryModel


class ProviderModel(LibraryModel):
    """A model at a provider; also any URL with `via: litellm`."""

    async def start(self) -> None:
        """Import litellm, check provider, key and price; raises `UserError` before any work."""
        await super().start()
        litellm = import_litellm()
        name = self._full_name()
        try:
            litellm.get_llm_provider(name)
        except litellm.BadRequestError as error:
            raise UserError(
                f"litellm knows no provider '{name.split('/')[0]}' (model '{name}'); write 'provider/model', e.g. "
                f"'openai/gpt-4o-mini', or 'local:{name}' for a model of the Hugging Face hub in this process"
            ) from error
        headers_of(self.spec)
        if self.spec.url is None and self.spec.api_key_env is None:
            missing = litellm.validate_environment(name)["missing_keys"]
            if missing:
                raise UserError(f"model '{name}' needs the environment variable {' and '.join(missing)}: not set")
        self._find_price(litellm, name)

    def _full_name(self) -> str:
        return f"openai/{self.spec.model}" if self.spec.url else self.spec.model

    def _find_price(self, litellm: Any, name: str) -> None:
        """List prices from litellm's table where the spec states none."""
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


def import_litellm() -> Any:
    """litellm, quiet and with the price table it was installed with (it would fetch one at import)."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        import litellm
    except ImportError as error:
        raise UserError(
            "a 'provider/model' is called through litellm: pip install litellm "
            "(an OpenAI-compatible URL needs no extra package)"
        ) from error
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    logging.getLogger("LiteLLM").setLevel(logging.WARNING)
    return litellm
