"""OpenAI's API for programs that play one conversation each: every conversation has its own address and key.

Only the player of the conversation NAME answers `/c/NAME/v1/chat/completions`. A call without its key, or to a
conversation that has ended or never existed, is refused, so conversations cannot mix. `POST /c/NAME/reward` with the
conversation's second key sets its reward.

Replies are sent whole: a stream is one piece, sent when it is complete. `rollout/agents/` answers and records calls.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from upshot.core.errors import UserError
from upshot.core.http_server import while_connected
from upshot.core.score import Score
from upshot.models.base import ModelCallError
from upshot.serving.openai.base import ApiServer, OtherModel, event
from upshot.serving.openai.format import ChatRequest, SampledTokens, choice_of, envelope, read_body, usage


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One reply to a call, as it was sampled and as it is sent."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    message: dict[str, Any]
    finish: str
    prompt_tokens: int


class ChatPlayer(Protocol):
    """Answers the calls of one conversation."""

    async def answer(self, asked: ChatRequest) -> list[ChatReply]:
        """The replies to a call: `asked.n` of them."""


@dataclass
class ServedConversation:
    """One conversation at its address."""

    player: ChatPlayer
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    """The key for calls; tools that run the policy's words may get to know it."""
    reward_key: str = field(default_factory=lambda: secrets.token_hex(16))
    """The key for posting the reward; only the program gets it."""
    reward: Score | None = None
    """The reward posted last."""
    faults: list[str] = field(default_factory=list)
    """The refused calls, which help to explain why a conversation failed."""


class ConversationServer(ApiServer):
    """Routes of all conversations that are open."""

    served = "POST …/v1/chat/completions and …/reward, GET …/v1/models, each below the conversation's own address"

    def __init__(self, name: str, tokenizer: Any) -> None:
        super().__init__(name, tokenizer)
        self._open: dict[str, ServedConversation] = {}

    def _routes(self) -> list[Route]:
        return [
            Route("/c/{conversation}/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/c/{conversation}/v1/models", self.models),
            Route("/c/{conversation}/reward", self.reward, methods=["POST"]),
        ]

    def open(self, player: ChatPlayer) -> ServedConversation:
        """Start answering a conversation's calls."""
        conversation = ServedConversation(player)
        self._open[conversation.name] = conversation
        return conversation

    def close(self, conversation: ServedConversation) -> None:
        """Stop answering them: calls of a program that outlives its conversation are refused."""
        self._open.pop(conversation.name, None)

    def _find(self, http: HttpRequest, reward: bool = False) -> ServedConversation:
        """The conversation of a request that brings its key, in either header; 401 for any other."""
        conversation = self._open.get(http.path_params["conversation"])
        key = "" if conversation is None else conversation.reward_key if reward else conversation.key
        keys = [http.headers.get("authorization", "").removeprefix("Bearer ").strip(), http.headers.get("x-api-key")]
        if conversation is None or not any(hmac.compare_digest((sent or "").encode(), key.encode()) for sent in keys):
            raise HTTPException(401, "no open conversation has this address and key: it has ended, or the key is wrong")
        return conversation

    async def models(self, http: HttpRequest) -> Response:
        """The only model."""
        self._find(http)
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def reward(self, http: HttpRequest) -> Response:
        """POST /c/NAME/reward {"reward": 0.5}: the conversation's reward; the last one counts."""
        conversation = self._find(http, reward=True)
        posted = await self._read(http, _read_object)
        conversation.reward = Score.of(posted.get("reward"), "the agent")
        if conversation.reward.is_missing:
            conversation.faults.append(conversation.reward.why)
            raise UserError(f"{conversation.reward.why}; post {{'reward': NUMBER}}")
        return JSONResponse({"reward": conversation.reward.value})

    async def chat(self, http: HttpRequest) -> Response:
        """POST /c/NAME/v1/chat/completions."""
        conversation = self._find(http)
        try:
            asked = await self._read(http, lambda raw: read_body(ChatRequest, raw))
            self._check_name(asked.model)
            replies = await while_connected(http.receive, conversation.player.answer(asked))
        except (UserError, OtherModel, ModelCallError) as error:
            conversation.faults.append(str(error))
            raise
        counts = usage(replies[0].prompt_tokens, sum(len(reply.ids) for reply in replies))
        if asked.stream:
            return StreamingResponse(self._events(asked, replies, counts), media_type="text/event-stream")
        choices = [self._choice(asked, i, {"message": reply.message}, reply) for i, reply in enumerate(replies)]
        return JSONResponse({**envelope("chat.completion", self.name), "choices": choices, "usage": counts})

    def _choice(self, asked: ChatRequest, index: int, body: dict[str, Any], reply: ChatReply) -> dict[str, Any]:
        return choice_of(asked, index, body, reply.finish, SampledTokens(reply.ids, reply.logprobs), self.pieces)

    async def _events(self, asked: ChatRequest, replies: list[ChatReply], counts: dict[str, int]) -> AsyncIterator[str]:
        outer = envelope("chat.completion.chunk", self.name)
        if asked.include_usage:
            outer["usage"] = None  # until the last event
        for i, reply in enumerate(replies):
            calls = [{"index": number, **call} for number, call in enumerate(reply.message.get("tool_calls", ()))]
            content = {"content": reply.message["content"] or ""}
            delta = {**reply.message, **content, **({"tool_calls": calls} if calls else {})}
            yield event(outer, {**self._choice(asked, i, {"delta": delta}, reply), "finish_reason": None})
            yield event(outer, {"index": i, "delta": {}, "finish_reason": reply.finish})
        if asked.include_usage:
            yield f"data: {json.dumps({**outer, 'choices': [], 'usage': counts})}\n\n"
        yield "data: [DONE]\n\n"


def _read_object(raw: bytes) -> dict[str, Any]:
    try:
        read = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the request is not valid JSON: {error}"[:300]) from None
    if not isinstance(read, dict):
        raise UserError("the request is not a JSON object")
    return read


def addresses(conversation: ServedConversation, root: str) -> Iterator[tuple[str, str]]:
    """The addresses and keys that a program gets for its conversation, by name; `root`: the server's address."""
    yield "base_url", f"{root}/c/{conversation.name}/v1"
    yield "api_key", conversation.key
    yield "reward_url", f"{root}/c/{conversation.name}/reward"
    yield "reward_key", conversation.reward_key
