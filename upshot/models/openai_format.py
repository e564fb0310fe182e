"""OpenAI's API format, both ways: requests to bodies, answers to completions. No I/O; streams that we send are the
server's (`serving/openai`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upshot.core.thought import MARKERS
from upshot.models.base import Completion, ModelCallError, Request


class BadResponse(Exception):
    """An answer that is not what the API promises; another attempt may succeed."""


class MissingScores(Exception):
    """An answer without the log-probabilities of the prompt."""


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """The completions of one call, and what they cost."""

    completions: list[Completion]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0


async def read_stream(events: AsyncIterator[Mapping[str, Any]], hear: Callable[[str], None]) -> Completion:
    """A streamed chat answer, passed to `hear` as it arrives; a thought in a separate field is put between markers."""
    text = ""
    finish, thinking = "stop", False
    async for event in events:
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            pieces = []
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                pieces.append(thought if thinking else MARKERS[0] + thought)
                thinking = True
            if words := delta.get("content"):
                pieces.append(MARKERS[1] + words if thinking else words)
                thinking = False
            for piece in pieces:
                hear(piece)
                text += piece
            finish = choice.get("finish_reason") or finish
    return Completion(text, finish)


def sampling_fields(request: Request, n: int, seed: int | None, ids: bool) -> dict[str, Any]:
    """The fields that chat and completions share, without those at their defaults. `ids`: whether to request ids."""
    sampling = request.sampling
    optional = {
        "top_p": None if sampling.top_p == 1.0 else sampling.top_p,
        "top_k": sampling.top_k or None,
        "min_p": sampling.min_p or None,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_ids) or None,
        "seed": seed,
        "n": n if n > 1 else None,
        "return_token_ids": ids or None,
        "return_tokens_as_token_ids": (ids and request.top_logprobs > 0) or None,
    }
    body: dict[str, Any] = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
    return body | {name: value for name, value in optional.items() if value is not None}


def chat_body(request: Request, n: int, seed: int | None, schema: bool, ids: bool) -> dict[str, Any]:
    """The body of a chat completion without its model name; `schema` and `ids`: what the endpoint can do."""
    messages = [message.to_dict() for message in request.prompt]  # type: ignore[union-attr]
    body: dict[str, Any] = {"messages": messages, **sampling_fields(request, n, seed, ids)}
    if request.schema is not None and schema:
        body["response_format"] = response_format(request.schema)
    if request.tools:
        body["tools"] = [dict(tool) for tool in request.tools]
    if ids or request.top_logprobs:
        body["logprobs"] = True
    if request.top_logprobs:
        body["top_logprobs"] = request.top_logprobs
    return body


def completion_body(request: Request, n: int, seed: int | None, ids: bool) -> dict[str, Any]:
    """The body of a completion whose prompt is token ids."""
    body: dict[str, Any] = {"prompt": list(request.prompt), **sampling_fields(request, n, seed, ids)}
    if ids or request.top_logprobs:
        body["logprobs"] = max(1, request.top_logprobs)  # some servers take 0 for "none"
    return body


def score_body(request: Request) -> dict[str, Any]:
    """The body that asks for the log-probabilities of a prompt's ids: it is echoed and nothing is added."""
    logprobs = max(1, request.top_logprobs)  # some servers take 0 for "none"
    return {"prompt": list(request.prompt), "max_tokens": 0, "temperature": 0, "echo": True, "logprobs": logprobs}


def response_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Structured output by JSON schema; strict if the schema meets OpenAI's conditions for it."""
    name = str(schema.get("title") or "answer").replace(" ", "_")
    described = {"name": name, "schema": dict(schema), "strict": _is_closed(schema)}
    return {"type": "json_schema", "json_schema": described}


def _is_closed(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        properties = schema.get("properties")
        if schema.get("type") == "object" or properties is not None:
            complete = set(properties or {}) == set(schema.get("required") or ())
            if schema.get("additionalProperties") is not False or not complete:
                return False
        return all(_is_closed(value) for value in schema.values())
    return all(_is_closed(item) for item in schema) if isinstance(schema, list) else True


def read_answer(data: Any, price_in: float = 0.0, price_out: float = 0.0) -> ApiAnswer:
    """Completions of a chat or completions answer; prices are per million tokens.

    Raises `BadResponse`, or `ModelCallError` if the model or its filter refused to answer: it would do so again.
    """
    try:
        choices = sorted(data["choices"], key=lambda choice: choice.get("index") or 0)
        if not choices:
            raise BadResponse("no choices")
        usage = data.get("usage") or {}
        prompt_tokens = int(usage.get("prompt_tokens") or 0)
        completion_tokens = int(usage.get("completion_tokens") or 0)
        share = prompt_tokens * price_in / 1e6 / len(choices)
        completions = [
            _read_choice(choice, prompt_tokens, length, share + length * price_out / 1e6)
            for choice, length in zip(choices, _lengths(choices, completion_tokens), strict=True)
        ]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise BadResponse(f"{type(error).__name__}: {error}") from error
    cost = (prompt_tokens * price_in + completion_tokens * price_out) / 1e6
    return ApiAnswer(completions, prompt_tokens, completion_tokens, cost)


def read_scores(data: Any, request: Request, price_in: float = 0.0) -> ApiAnswer:
    """The log-probabilities of a request's given ids; raises `BadResponse` or `MissingScores`."""
    ids, count = list(request.prompt), request.given
    try:
        values = (data["choices"][0].get("logprobs") or {}).get("token_logprobs") or []
        tokens = int((data.get("usage") or {}).get("prompt_tokens") or len(ids))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise BadResponse(f"{type(error).__name__}: {error}") from error
    numbers = all(isinstance(value, int | float) for value in values[-count:])
    if len(values) != len(ids) or values[0] is not None or not numbers:  # a prompt's first id has none
        raise MissingScores(f"{len(values)} log-probabilities came back for the prompt's {len(ids)} ids, not one each")
    cost = tokens * price_in / 1e6
    logprobs = tuple(float(value) for value in values[-count:])
    scored = Completion("", "length", tuple(ids[-count:]), logprobs, prompt_tokens=tokens, cost=cost)  # type: ignore[arg-type]
    return ApiAnswer([scored], tokens, 0, cost)


def _lengths(choices: Sequence[Mapping[str, Any]], total: int) -> list[int]:
    ids = [choice.get("token_ids") for choice in choices]
    if all(ids):
        return [len(i) for i in ids if i is not None]
    each, remainder = divmod(total, len(choices))
    return [each + (i < remainder) for i in range(len(choices))]


def _read_choice(choice: Mapping[str, Any], prompt_tokens: int, completion_tokens: int, cost: float) -> Completion:
    finish = choice.get("finish_reason") or "stop"
    message = choice.get("message")
    calls: tuple[Mapping[str, Any], ...] = ()
    if message is None:
        text = choice["text"]
    else:
        text, calls = message.get("content"), tuple(message.get("tool_calls") or ())
        if message.get("refusal"):
            raise ModelCallError("refused", str(message["refusal"]))
    if finish == "content_filter":
        raise ModelCallError("refused", "the endpoint's content filter")
    if text is None:
        if not calls and finish != "length":
            raise BadResponse("neither content nor tool calls")
        text = ""
    if not isinstance(text, str):
        raise BadResponse(f"content is {type(text).__name__}, not text")
    logprobs, top = _read_logprobs(choice.get("logprobs"))
    ids = choice.get("token_ids")
    if ids is None or logprobs is None or len(logprobs) != len(ids):
        logprobs = None
    finish, ids = "stop" if finish == "eos" else finish, None if ids is None else tuple(ids)
    return Completion(text, finish, ids, logprobs, calls, prompt_tokens, completion_tokens, cost, top_logprobs=top)


Logprobs = tuple[tuple[float, ...] | None, tuple[tuple[tuple[int, float], ...], ...] | None]


def _read_logprobs(data: Mapping[str, Any] | None) -> Logprobs:
    """Log-probabilities of the sampled tokens and, if tokens are named by id, of the most likely ones."""
    if not data:
        return None, None
    content = data.get("content")
    if content is not None:  # chat
        chosen = tuple(float(item["logprob"]) for item in content)
        tops = [{t["token"]: t["logprob"] for t in item.get("top_logprobs") or ()} for item in content]
    elif data.get("token_logprobs") is not None:  # completions
        chosen = tuple(float(value) for value in data["token_logprobs"])
        tops = [dict(item or {}) for item in data.get("top_logprobs") or ()]
    else:
        return None, None
    if not tops or not all(token.startswith("token_id:") for item in tops for token in item) or not any(tops):
        return chosen, None
    return chosen, tuple(tuple((int(t[9:]), float(p)) for t, p in item.items()) for item in tops)


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string, and whether one was found."""
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)
