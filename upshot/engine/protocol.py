"""OpenAI's request and response formats, as far as the server speaks them.

Beyond OpenAI's own fields: top_k, min_p, stop_token_ids, token ids as prompts, and `token_ids` of the choices
(`return_token_ids: true`). Tools go to the chat template; calls are not parsed out of the text.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from upshot.chat import messages_from
from upshot.errors import UserError
from upshot.models.base import Completion, Request, Sampling


class Shared(BaseModel):
    """Fields of both endpoints."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=1024)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool = False

    def sampling(self, max_tokens: int) -> Sampling:
        """How to sample."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            stop=tuple(stops),
            stop_ids=tuple(self.stop_token_ids),
            seed=self.seed,
        )

    def schema_of(self) -> dict[str, Any] | None:
        """The JSON schema asked for."""
        form = self.response_format or {}
        kind = form.get("type", "text")
        if kind == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        if kind == "json_schema" and isinstance(form.get("json_schema"), dict):
            return form["json_schema"].get("schema") or {"type": "object"}
        raise UserError(f"response_format.type '{kind}' is not known; use text, json_object or json_schema")


class ChatRequest(Shared):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = []

    def requests(self, limit: int) -> list[Request]:
        """What is asked of the model."""
        most = self.max_completion_tokens or self.max_tokens or limit
        messages = [{**m, "content": text_of(m.get("content"))} for m in self.messages]
        top = self.top_logprobs if self.logprobs else 0
        return [Request(messages_from(messages), self.sampling(most), self.n, self.schema_of(), self.tools, "", top)]


class CompletionRequest(Shared):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    def prompts(self, encode: Any) -> list[list[int]]:
        """The prompts as ids."""
        given = self.prompt
        if isinstance(given, str):
            given = [given]
        if given and isinstance(given[0], int):
            given = [given]  # type: ignore[list-item]
        return [encode(p) if isinstance(p, str) else list(p) for p in given]  # type: ignore[arg-type,call-overload]

    def requests(self, encode: Any) -> list[Request]:
        """What is asked of the model."""
        most = 16 if self.max_tokens is None else self.max_tokens
        sampling = self.sampling(max(1, most))
        return [
            Request(ids, sampling, self.n, self.schema_of(), (), "", self.logprobs or 0) for ids in self.prompts(encode)
        ]


def text_of(content: Any) -> str:
    """A message's content as text; parts that are no text are refused."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if part.get("type") != "text":
            raise UserError(f"a content part of type '{part.get('type')}' cannot be read; this server takes text")
        parts.append(part["text"])
    return "".join(parts)


def envelope(
    kind: Literal["chat.completion", "chat.completion.chunk", "text_completion"], model: str
) -> dict[str, Any]:
    """The outer fields of a response."""
    prefix = "cmpl-" if kind == "text_completion" else "chatcmpl-"
    return {"id": prefix + uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": model}


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Token counts."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def chat_logprobs(ids: Sequence[int], logprobs: Sequence[float], tops: Any, piece: Any) -> dict[str, Any]:
    """Log-probabilities in the chat endpoint's form."""
    content = []
    for i, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        entry = {"token": piece(token), "logprob": logprob, "bytes": list(piece(token).encode())}
        above = tops[i] if tops else ()
        entry["top_logprobs"] = [{"token": piece(t), "logprob": p, "bytes": list(piece(t).encode())} for t, p in above]
        content.append(entry)
    return {"content": content, "refusal": None}


def text_logprobs(
    ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Any], piece: Any, offset: int = 0
) -> dict[str, Any]:
    """Log-probabilities in the completions endpoint's form."""
    tokens = [piece(t) for t in ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    top = [None if above is None else {piece(t): p for t, p in above} for above in tops]
    return {"tokens": tokens, "token_logprobs": list(logprobs), "top_logprobs": top, "text_offset": offsets}


def chat_choice(index: int, done: Completion, asked: ChatRequest, piece: Any) -> dict[str, Any]:
    """One choice of a chat response."""
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": done.text},
        "finish_reason": done.finish,
        "logprobs": None,
    }
    if asked.logprobs:
        choice["logprobs"] = chat_logprobs(done.ids or (), done.logprobs or (), done.top_logprobs, piece)
    if asked.return_token_ids:
        choice["token_ids"] = list(done.ids or ())
    return choice
