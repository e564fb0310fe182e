"""OpenAI's request and response formats, as far as the server supports them.

Beyond OpenAI's own fields: top_k, min_p, stop_token_ids, token ids as prompts, `token_ids` of the choices
(`return_token_ids: true`), ids as the names of tokens (`return_tokens_as_token_ids: true`) and `reasoning_content` of
messages in requests and responses. A field is either honoured or refused by name; null counts as absent.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from upshot.config.sampling import Sampling
from upshot.core.conversation import Message, text_of
from upshot.core.errors import UserError, did_you_mean
from upshot.core.thought import MARKERS
from upshot.models.base import Completion, Request
from upshot.models.tokens import TokenPieces

BOOKKEEPING = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that do not affect the answer."""
NEUTRAL: dict[str, Any] = {
    "logit_bias": {},
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "best_of": 1,
    "suffix": "",
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
}
"""Unsupported fields that some clients always send, and the only value accepted: the one without an effect."""
LOWEST = -9999.0
"""Stands for a log-probability of minus infinity, which JSON cannot express."""


Ids = Annotated[list[int], Field(fail_fast=True)]  # of a million wrong items, only one is reported and kept
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Body = TypeVar("Body", bound=BaseModel)


def read_body(kind: type[Body], raw: bytes) -> Body:
    """A request from its bytes, or a `UserError` that names its first problem."""
    try:
        return kind.model_validate(json.loads(raw))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}: {message}" if where else message) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"the request is not valid JSON: {error}"[:300]) from None


def encodes(value: Any) -> bool:
    """Whether every text in a value is valid: JSON can express half a surrogate pair, UTF-8 cannot."""
    if isinstance(value, str):
        try:
            return value.isascii() or bool(value.encode())
        except UnicodeEncodeError:
            return False
    if isinstance(value, dict):
        return all(map(encodes, value)) and all(map(encodes, value.values()))
    return all(map(encodes, value)) if isinstance(value, list) else True


class StrictBody(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if not encodes(data):
            raise ValueError("a text holds half of a surrogate pair (U+D800 to U+DFFF), which is not a character")
        asked = {name: value for name, value in data.items() if value is not None and name not in BOOKKEEPING}
        for name in [name for name in asked if name not in cls.model_fields]:
            if name not in NEUTRAL:
                raise ValueError(f"the field '{name}' is not known here; {did_you_mean(name, cls.model_fields)}")
            if asked.pop(name) != NEUTRAL[name]:
                raise ValueError(
                    f"'{name}' is not supported (only its neutral value {NEUTRAL[name]!r} is): leave it out"
                )
        return asked


class StreamOptions(StrictBody):
    """Options of a stream."""

    include_usage: bool = False


class CommonFields(StrictBody):
    """Fields of both endpoints."""

    model: str = ""
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=1024)
    stop: str | Texts | None = None
    stop_token_ids: Ids = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _check_stream_options(self) -> CommonFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' are for streams: set stream to true or leave them out")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def name_of(self, token: int, pieces: TokenPieces) -> str:
        """The name of a token in the response: its text or, if requested, its id."""
        return f"token_id:{token}" if self.return_tokens_as_token_ids else pieces.text(token)

    def sampling(self, max_tokens: int) -> Sampling:
        """How to sample."""
        cuts, stop_ids = (self.top_p, max(0, self.top_k), self.min_p), tuple(self.stop_token_ids)
        return Sampling(max_tokens, self.temperature, *cuts, self.stops, stop_ids, self.seed)

    def schema_of(self) -> dict[str, Any] | None:
        """The requested JSON schema."""
        form = self.response_format or {}
        kind = form.get("type") or "text"
        if kind == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        if kind == "json_schema":
            described = form.get("json_schema")
            schema = described.get("schema") or {"type": "object"} if isinstance(described, dict) else None
            if not isinstance(schema, dict):
                raise UserError("response_format.json_schema.schema must be a JSON schema, an object")
            return schema
        raise UserError(f"response_format.type '{kind}' is not known; use text, json_object or json_schema")


class ChatRequest(CommonFields):
    """POST /v1/chat/completions."""

    messages: Objects = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: Objects = []
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_fit(self) -> ChatRequest:
        for i, tool in enumerate(self.tools):
            check_tool(tool, f"tools.{i}")
        if self.must_call and self.schema_of() is not None:
            raise ValueError("response_format and a tool_choice that demands a call cannot be combined; leave one out")
        if self.must_call:
            self.demanded_tools()
        if self.top_logprobs and not self.logprobs:
            raise ValueError("'top_logprobs' needs logprobs: true")
        return self

    @property
    def must_call(self) -> bool:
        """Whether the reply must be a tool call."""
        return self.tool_choice not in ("auto", "none")

    def demanded_tools(self) -> list[dict[str, Any]]:
        """The tools one of which must be called."""
        if self.tool_choice == "required" and self.tools:
            return self.tools
        if not isinstance(self.tool_choice, dict):
            raise ValueError("tool_choice is 'required', but there are no tools: give some, or leave it out")
        function = self.tool_choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        matching = [tool for tool in self.tools if tool["function"]["name"] == name]
        if not matching:
            known = [tool["function"]["name"] for tool in self.tools]
            raise ValueError(f"tool_choice names the tool {name!r}; {did_you_mean(str(name), known)}")
        return matching[:1]

    def logprobs_of(self, sampled: SampledTokens, pieces: TokenPieces) -> dict[str, Any] | None:
        """Log-probabilities in the chat endpoint's format, if requested."""
        if not self.logprobs:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            name, raw = self.name_of(token, pieces), list(pieces.raw(token))
            return {"token": name, "logprob": max(logprob, LOWEST), "bytes": raw}

        content = []
        for i, (token, logprob) in enumerate(zip(sampled.ids, sampled.logprobs, strict=True)):
            above = [entry(t, p) for t, p in (sampled.tops[i] if sampled.tops else ())]
            content.append({**entry(token, logprob or 0.0), "top_logprobs": above})
        return {"content": content, "refusal": None}

    def request(self, limit: int, thinks: bool = False) -> Request:
        """The request for the model; a model that `thinks` also reads its earlier thoughts."""
        most = self.max_completion_tokens or self.max_tokens or limit
        messages = [message_of(m, f"messages.{i}", thinks) for i, m in enumerate(self.messages)]
        tools = [] if self.tool_choice == "none" else self.tools
        return Request(messages, self.sampling(most), self.n, self.schema_of(), tools, "", self.top_logprobs)


class CompletionRequest(CommonFields):
    """POST /v1/completions."""

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @property
    def given(self) -> Sequence[Any]:
        """The prompts, each a text or ids; the field may hold a single one without a list."""
        alone = not self.prompt or isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if alone else self.prompt

    def prompts(self, encode: Callable[[str], list[int]]) -> list[list[int]]:
        """The prompts as ids."""
        prompts = [encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in self.given]
        if not all(prompts):
            raise UserError("prompt: an empty prompt cannot be continued; give at least one token")
        return prompts

    def requests(self, prompts: list[list[int]]) -> list[Request]:
        """The requests for continuations; none with max_tokens 0."""
        if self.echo and self.stream:
            raise UserError("'echo' is not streamed: leave out echo or stream")
        if self.max_tokens == 0 and not self.echo:
            raise UserError("max_tokens 0 is allowed only with echo")
        if self.max_tokens == 0:
            return []
        sampling, schema = self.sampling(16 if self.max_tokens is None else self.max_tokens), self.schema_of()
        return [Request(ids, sampling, self.n, schema, (), "", self.logprobs or 0) for ids in prompts]

    def scores(self, prompts: list[list[int]]) -> list[Request]:
        """The requests for the prompts' log-probabilities: of all ids but the first."""
        if not self.echo or self.logprobs is None:
            return []
        return [Request(ids, top_logprobs=self.logprobs, given=len(ids) - 1) for ids in prompts if len(ids) > 1]

    def logprobs_of(self, sampled: SampledTokens, pieces: TokenPieces) -> dict[str, Any] | None:
        """Log-probabilities in the completions endpoint's format, if requested."""
        if self.logprobs is None:
            return None
        *offsets, _ = accumulate((len(pieces.text(token)) for token in sampled.ids), initial=0)
        # The likeliest comes last: if two tokens have the same name, its number is kept.
        top = [
            None if above is None else {self.name_of(t, pieces): max(p, LOWEST) for t, p in reversed(above)}
            for above in sampled.tops or [()] * len(sampled.ids)
        ]
        return {
            "tokens": [self.name_of(t, pieces) for t in sampled.ids],
            "token_logprobs": [None if p is None else max(p, LOWEST) for p in sampled.logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }


ApiRequest = ChatRequest | CompletionRequest


def check_tool(tool: dict[str, Any], where: str) -> None:
    """Refuse an invalid definition of a tool."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise ValueError(f'{where} is not {{"type": "function", "function": {{"name": …, "parameters": {{…}}}}}}')
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{where}.function has no name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise ValueError(f"{where}.function.parameters must be a JSON schema, an object")


def message_of(data: dict[str, Any], where: str, thinks: bool = False) -> Message:
    """A message of a request, or a `UserError` that names its problem."""
    if not isinstance(data.get("role"), str) or not data["role"]:
        raise UserError(f"{where} has no role; give system, user, assistant or tool")
    calls = data.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UserError(f"{where}.tool_calls must be a list of objects")
    content = text_of(data.get("content"), where)
    thought = data.get("reasoning_content")
    if thinks and data["role"] == "assistant" and isinstance(thought, str) and thought:
        content = f"{MARKERS[0]}\n{thought}\n{MARKERS[1]}\n\n{content}"  # templates separate them again
    return Message.from_dict({**data, "content": content})


def envelope(
    kind: Literal["chat.completion", "chat.completion.chunk", "text_completion"], model: str
) -> dict[str, Any]:
    """The outer fields of a response."""
    prefix = "cmpl-" if kind == "text_completion" else "chatcmpl-"
    return {"id": prefix + uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": model}


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Token counts."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class SampledTokens(NamedTuple):
    """Tokens of a choice with their log-probabilities."""

    ids: Sequence[int]
    logprobs: Sequence[float | None]
    """None if it has none, like the first token of a text."""
    tops: Sequence[Any] | None = None
    """The likeliest tokens at each place, if requested."""

    @classmethod
    def of(cls, done: Completion) -> SampledTokens:
        """The tokens of a completion."""
        return cls(done.ids or (), done.logprobs or (), done.top_logprobs)


def choice_of(
    asked: ApiRequest, index: int, body: dict[str, Any], finish: str | None, sampled: SampledTokens, pieces: TokenPieces
) -> dict[str, Any]:
    """One choice of a response, or of an event of a stream; `body` is its message, text or delta."""
    choice = {"index": index, **body, "finish_reason": finish, "logprobs": asked.logprobs_of(sampled, pieces)}
    return {**choice, "token_ids": list(sampled.ids)} if asked.return_token_ids else choice
