"""How a recipe names a model: one string, or a mapping with the string and its options.

http://127.0.0.1:8000/v1#served-name    any OpenAI-compatible endpoint (several: a list, or a file of them, as `url`)
openai/gpt-4o-mini                      a provider, through litellm
path/to/hf-folder, local:NAME           in process
smollm2-135m                            in process, offline
serve:NAME                              a server of the recipe's serve file (`upshot serve FILE.yaml`)
scripted:echo, scripted:pkg.mod:function
policy                                  the model in training
policy@start, policy@20                 a copy of it: as it was when training began, or renewed every 20 steps
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, ValidationError, model_validator

from upshot.config.sampling import Sampling
from upshot.config.short_form import ShortForm
from upshot.config.validation import explain_error
from upshot.core.errors import UserError, did_you_mean

SMOLLM2 = "smollm2-135m"
HTTP = ("http://", "https://")
Kind = Literal["endpoint", "replicas", "provider", "local", "scripted", "policy", "served"]
_REMOTE = {"endpoint", "replicas", "provider", "served"}
_ONLY_FOR: dict[str, Set[str]] = {
    **dict.fromkeys(("via", "token_ids"), frozenset({"endpoint", "replicas", "served"})),
    **dict.fromkeys(("api_key_env", "headers_env", "extra_body", "omit", "structured"), _REMOTE),
    **dict.fromkeys(("timeout_s", "retries", "backoff_s", "patience_s", "concurrency"), _REMOTE | {"scripted"}),
    **dict.fromkeys(("requests_per_minute", "tokens_per_minute", "price_in", "price_out"), _REMOTE | {"scripted"}),
    "cache": _REMOTE | {"scripted", "local"},
    "latency_s": {"scripted"},
    **dict.fromkeys(("dtype", "device", "weights", "kv", "kv_gb"), frozenset({"local"})),
}
"""Options that apply only to some kinds of models."""


class ModelSpec(ShortForm):
    """A model and how it may be called."""

    short_key: ClassVar[str] = "model"
    own_options: ClassVar[bool] = True

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    model: str = ""
    """The model: a path or name as described at the top of this page; with `url`, the name under which the endpoint
    serves it. Empty with `url`: the only model that the endpoint lists."""
    url: str | tuple[str, ...] | None = None
    """Base address of an OpenAI-compatible endpoint, including `/v1`. For replicas of one model: a list of addresses,
    or a file with one address per line, which is watched for changes during the run."""
    via: Literal["http", "litellm"] = "http"
    """Client for a `url`: Upshot's own (fastest), or litellm."""

    concurrency: int = Field(64, ge=1)
    """Maximum number of concurrent calls, over all roles that share the endpoint; with replicas, per replica."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Maximum number of calls per minute; None: no limit on our side."""
    tokens_per_minute: float | None = Field(None, gt=0)
    """Maximum number of prompt and completion tokens per minute; None: no limit on our side."""
    timeout_s: float = Field(120.0, gt=0)
    """Time limit of one attempt in seconds, including the connection."""
    retries: int = Field(6, ge=0)
    """Number of further attempts after a dropped connection, a timeout, a 5xx status or an unreadable answer."""
    backoff_s: float = Field(0.2, gt=0)
    """Mean wait in seconds before the first retry; it doubles with each retry, up to 20 s, with jitter."""
    patience_s: float = Field(300.0, ge=0)
    """Total time in seconds that one call may wait for rate limits (429) before it fails as rate_limited."""

    temperature: float | None = Field(None, ge=0)
    """If set, replaces the temperature that the role asks for."""
    max_tokens: int | None = Field(None, ge=1)
    """If set, replaces the length limit that the role asks for."""
    top_p: float | None = Field(None, gt=0, le=1)
    """If set, replaces the nucleus cut that the role asks for."""

    cache: bool | str = False
    """Response cache: false, true (the user's cache folder), or a folder."""
    price_in: float | None = Field(None, ge=0)
    """US dollars per million prompt tokens; None: the provider's list price, 0 for endpoints on this machine."""
    price_out: float | None = Field(None, ge=0)
    """US dollars per million completion tokens; None as above."""

    api_key_env: str | None = None
    """Environment variable that holds the API key; None: OPENAI_API_KEY for api.openai.com, for providers their own
    variable."""
    headers_env: dict[str, str] = Field(default_factory=dict)
    """Extra headers: name → environment variable that holds the value."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Fields added to every request body."""
    omit: tuple[str, ...] = ()
    """Fields that are never sent, for endpoints that refuse them (seed, top_p …)."""
    structured: bool | None = None
    """Whether the endpoint enforces JSON schemas; None: try it, and remember if it refuses."""
    token_ids: bool | None = None
    """Whether the endpoint returns token ids (`return_token_ids`, as vLLM does); None: decide by its model list."""

    latency_s: float = Field(0.0, ge=0)
    """scripted only: seconds that each reply takes."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """In process only: auto is bfloat16 on a GPU that computes with it (Ampere or later), else float32."""
    device: str = "auto"
    """In process only: auto is the first GPU, else the CPU."""
    weights: Literal["model", "fp8"] = "model"
    """In process only: fp8 keeps the projections in 8 bits, in half the memory (needs a Hopper GPU or later)."""
    kv: Literal["model", "fp8"] = "model"
    """In process only: fp8 keeps keys and values in 8 bits (needs a GPU and a model family that the fused block
    supports)."""
    kv_gb: float = Field(0.0, ge=0)
    """In process only: memory in GiB for keys and values; 0: chosen by the memory plan, else a third of what is
    free."""

    @model_validator(mode="before")
    @classmethod
    def _split_address(cls, value: Any) -> Any:
        value = cls.expand(value)
        if not isinstance(value, Mapping):
            return value
        data = dict(value)
        for key in data:
            if key not in cls.model_fields:
                raise ValueError(f"unknown option '{key}' of a model; {did_you_mean(str(key), cls.model_fields)}")
        if isinstance(data.get("url"), list | tuple):
            data["url"] = _addresses(data["url"])
        address = data.get("url") or data.get("model")
        if isinstance(address, str) and address.startswith(HTTP):
            url, _, served = address.partition("#")
            named = data.get("model")
            data |= {"url": url.rstrip("/"), "model": served if named == address else named or served}
        return data

    @model_validator(mode="after")
    def _no_idle_options(self) -> ModelSpec:
        """Refuse options that would have no effect, rather than ignore them."""
        kind = self.kind
        for option in sorted(self.model_fields_set & set(_ONLY_FOR)):
            differs = getattr(self, option) != type(self).model_fields[option].get_default(call_default_factory=True)
            if differs and kind not in _ONLY_FOR[option]:
                raise ValueError(
                    f"the option '{option}' has no effect on '{self.label}' ({kind}); it applies to "
                    f"{' and '.join(sorted(_ONLY_FOR[option]))} models"
                )
        return self

    @classmethod
    def parse(cls, value: Any, where: str = "") -> ModelSpec:
        """A spec from a string, mapping or spec; what is wrong is a `UserError`."""
        if isinstance(value, ModelSpec):
            return value
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise UserError(explain_error(error, cls, where or "model")) from error

    @property
    def kind(self) -> Kind:
        """Which backend the spec means."""
        if self.url:
            single = isinstance(self.url, str) and self.url.startswith(HTTP)
            return "endpoint" if single else "replicas"
        if self.model == "policy" or self.model.startswith("policy@"):
            check_copy(self.model)
            return "policy"
        if self.model.startswith("scripted:"):
            return "scripted"
        if self.model.startswith("serve:"):
            return "served"
        if self.model == SMOLLM2 or self.model.startswith(("local:", "/", "./", "../", "~")):
            return "local"
        folder = Path(self.model).expanduser()
        if self.model and ((folder / "config.json").is_file() or (folder / "checkpoints").is_dir()):  # a run's, too
            return "local"
        if "/" in self.model.strip("/"):
            return "provider"
        raise ValueError(
            f"unknown model '{self.model}'; give a URL ('http://host:8000/v1#name'), 'provider/model', a folder with "
            f"a config.json, 'local:NAME', 'serve:NAME', 'scripted:NAME', '{SMOLLM2}' or 'policy'"
        )

    @property
    def label(self) -> str:
        """A short name for messages and logs."""
        if not self.url:
            return self.model
        if isinstance(self.url, str):
            return f"{self.url}#{self.model}"
        return f"{self.url[0]}#{self.model} and {len(self.url) - 1} more"

    @property
    def on_this_machine(self) -> bool:
        """Whether the endpoint is on the loopback interface, so free and without a proxy."""
        hosts = [urlsplit(url).hostname or "" for url in ([self.url] if isinstance(self.url, str) else self.url or ())]
        return bool(hosts) and all(host in ("localhost", "::1") or host.startswith("127.") for host in hosts)

    def runs_on(self, device: str) -> bool:
        """Whether it runs in process, on the device that the policy is given."""
        return self.kind == "local" and self.device in ("auto", device)

    def at(self, url: str) -> ModelSpec:
        """The spec of one replica: its calls are cached, and tried again, by the whole."""
        whole = self.model_dump(exclude={"cache", "retries"})
        return ModelSpec.parse({**whole, "url": url, "retries": 0})

    def sampling(self, asked: Sampling) -> Sampling:
        """What a role asks for, with the spec's own settings put over it."""
        sampling = {k: v for k in ("temperature", "max_tokens", "top_p") if (v := getattr(self, k)) is not None}
        return replace(asked, **sampling) if sampling else asked


def check_copy(model: str) -> None:
    """Refuse a copy of the policy without a valid step; `ValueError`, as pydantic expects."""
    when = model.partition("@")[2]
    if model.startswith("policy@") and when != "start" and not re.fullmatch("0*[1-9][0-9]*", when):
        raise ValueError(f"'{model}' should read 'policy@start', or 'policy@N' for a copy renewed every N steps")


def _addresses(listed: Sequence[Any]) -> Any:
    """A list of addresses, each once; a list with one address is that address."""
    for address in listed:
        if not isinstance(address, str) or not address.startswith(HTTP):
            raise ValueError(f"'url' lists {address!r}, which is not an address such as 'http://host:8000/v1'")
    addresses = tuple(dict.fromkeys(address.rstrip("/") for address in listed))
    if not addresses:
        raise ValueError("'url' is an empty list; name at least one address")
    return addresses if len(addresses) > 1 else addresses[0]
