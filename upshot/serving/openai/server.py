"""The OpenAI-compatible server on the engine: chat, completions, streaming, metrics.

Requests share one engine and one event loop. If a client disconnects, its sequences are aborted; if too many wait, the
answer is 429. `base.py` reads and refuses requests.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from upshot.core.http_server import metrics_page, while_connected
from upshot.engine.sequence import DONE, Sequence
from upshot.models.base import Completion, Request
from upshot.models.engine_model import EngineModel
from upshot.serving.openai.base import ApiServer, event
from upshot.serving.openai.format import (
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    SampledTokens,
    choice_of,
    envelope,
    read_body,
    usage,
)
from upshot.serving.openai.message import GrowingMessage, ReplyFormat
from upshot.serving.openai.stream import GrowingText

GAUGES = {"pages_held", "pages_total", "running", "waiting", "version"}
"""The engine's counts that can go down (Prometheus gauges)."""


TokenQueue = asyncio.Queue[tuple[Sequence, int | None, float] | None]
"""An event of a stream: a sequence's next token with its log-probability, or no token: the sequence has ended. None:
the client has disconnected."""


class OpenAIServer(ApiServer):
    """Routes and counters of one served model."""

    served = "POST /v1/chat/completions and /v1/completions, GET /v1/models, /health and /metrics"

    def __init__(
        self,
        model: EngineModel,
        api_key: str = "",
        max_tokens: int = 1024,
        any_name: bool = False,
        tool_parser: str = "auto",
    ) -> None:
        super().__init__(model.name, model.tokenizer, api_key, any_name, tool_parser)
        self.model, self.max_tokens = model, max_tokens
        self.seconds = 0.0

    def _routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]

    # --- small endpoints

    async def health(self, _: HttpRequest) -> Response:
        """That the server is up, and the version of its weights."""
        return JSONResponse({"status": "ok", "model": self.model.name, "version": self.model.engine.version})

    async def models(self, _: HttpRequest) -> Response:
        """A list with the served model."""
        self.counts["requests"] += 1
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def one_model(self, http: HttpRequest) -> Response:
        """The served model, if the request names it."""
        self.counts["requests"] += 1
        self._check_name(http.path_params["name"])
        return JSONResponse(self._entry())

    def _entry(self) -> dict[str, Any]:
        return {**super()._entry(), "max_model_len": self.model.engine.shape.max_length}

    async def metrics(self, _: HttpRequest) -> Response:
        """Counters in Prometheus' text format."""
        values = {**self.model.stats(), **self.counts, "request_seconds": self.seconds}
        gauges = {name: values.pop(name) for name in GAUGES & values.keys()}
        return PlainTextResponse(metrics_page("upshot", values, gauges), media_type="text/plain; version=0.0.4")

    # --- generation

    async def chat(self, http: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        asked, request, form = await self._read(http, self._read_chat)
        if asked.stream:
            return self._stream(asked, [request], form, http)
        [done] = await self._finish([request], http)
        choices = []
        for i, completion in enumerate(done):
            message, finish = form.read(completion.ids or (), request.sampling.stop, completion.finish)
            choices.append(choice_of(asked, i, {"message": message}, finish, SampledTokens.of(completion), self.pieces))
        counts = usage(done[0].prompt_tokens, sum(c.completion_tokens for c in done))
        return JSONResponse({**envelope("chat.completion", self.model.name), "choices": choices, "usage": counts})

    def _read_chat(self, raw: bytes) -> tuple[ChatRequest, Request, ReplyFormat]:
        asked = read_body(ChatRequest, raw)
        self._check_name(asked.model)
        count = len(asked.messages)  # each message has at least one id
        self.model.check_size(count, f"{count} messages")
        return asked, *self._prepare(asked)

    def _prepare(self, asked: ChatRequest) -> tuple[Request, ReplyFormat]:
        """The request with its exact ids, and how to read the replies to it."""
        request = asked.request(self.max_tokens, self.dialect.thinks)
        prompt = self.model.prompt_ids(request)
        several = asked.parallel_tool_calls and not isinstance(asked.tool_choice, dict)
        form = self.dialect.reply_format(prompt, bool(request.tools), request.schema is not None, several)
        rules = self.dialect.grammar(asked.demanded_tools(), form) if asked.must_call else ""
        return replace(request, prompt=prompt, lark=rules), form

    async def completions(self, http: HttpRequest) -> Response:
        """POST /v1/completions."""
        asked, prompts = await self._read(http, self._read_completion)
        requests, scores = asked.requests(prompts), asked.scores(prompts)
        for ids in prompts:  # check all before anything is computed, also those that need no computation
            self.model.engine.check_prompt(ids)
        if asked.stream:
            return self._stream(asked, requests, ReplyFormat(self.model.tokenizer), http)
        # Scores first: they leave the prompts' pages to those that continue them.
        finished = await self._finish([*scores, *requests], http)
        scored = iter(finished[: len(scores)])
        done = finished[len(scores) :] or [[Completion("", "length", (), ())]] * len(prompts)
        choices: list[dict[str, Any]] = []
        for ids, group in zip(prompts, done, strict=True):
            prompt_scores = next(scored)[0] if scores and len(ids) > 1 else None
            for completion in group:
                choices.append(self._text_choice(len(choices), asked, ids, prompt_scores, completion))
        counts = usage(sum(map(len, prompts)), sum(c.completion_tokens for group in done for c in group))
        return JSONResponse({**envelope("text_completion", self.model.name), "choices": choices, "usage": counts})

    def _read_completion(self, raw: bytes) -> tuple[CompletionRequest, list[list[int]]]:
        asked = read_body(CompletionRequest, raw)
        self._check_name(asked.model)
        self.model.check_queue(asked.n * len(asked.given))
        return asked, asked.prompts(self.model.encode)

    def _text_choice(
        self, index: int, asked: CompletionRequest, prompt: list[int], scored: Completion | None, done: Completion
    ) -> dict[str, Any]:
        sampled = SampledTokens.of(done)
        choice = choice_of(asked, index, {"text": done.text}, done.finish, sampled, self.pieces)
        if asked.echo:
            choice["text"] = self.model.tokenizer.decode(prompt, skip_special_tokens=False) + done.text
            logprobs, above = (scored.logprobs or (), scored.top_logprobs) if scored else ((), None)
            tops = [None, *(above or [()] * len(logprobs)), *(sampled.tops or [()] * len(sampled.ids))]
            whole = SampledTokens([*prompt, *sampled.ids], [None, *logprobs, *sampled.logprobs], tops)
            choice["logprobs"] = asked.logprobs_of(whole, self.pieces)
        return choice

    async def _finish(self, requests: list[Request], http: HttpRequest) -> list[list[Completion]]:
        """All completions, or `ClientGone` if the client disconnected meanwhile."""
        began = time.perf_counter()
        try:
            return await while_connected(http.receive, self.model.generate_all(requests))
        finally:
            self.seconds += time.perf_counter() - began

    def _stream(
        self, asked: ApiRequest, requests: list[Request], form: ReplyFormat, http: HttpRequest
    ) -> StreamingResponse:
        """Start the sequences now, so that a refusal is an HTTP status; their tokens follow as events."""
        queue: TokenQueue = asyncio.Queue()

        def on_token(seq: Sequence, token: int, logprob: float) -> None:
            queue.put_nowait((seq, token, logprob))

        def on_done(seq: Sequence) -> None:
            queue.put_nowait((seq, None, 0.0))

        running: list[Sequence] = []
        try:
            for request in requests:
                running += self.model.submit(request, on_token, on_done)
        except Exception:
            for seq in running:  # nobody will read their tokens
                self.model.engine.abort(seq)
            raise
        events = self._events(asked, running, queue, form, http)
        # If sending is cancelled between two events, only garbage collection would close them.
        return StreamingResponse(events, media_type="text/event-stream", background=BackgroundTask(events.aclose))

    async def _events(
        self, asked: ApiRequest, running: list[Sequence], queue: TokenQueue, form: ReplyFormat, http: HttpRequest
    ) -> AsyncGenerator[str, None]:
        """The events of a stream; if they are closed early, the remaining sequences are aborted."""
        chat = isinstance(asked, ChatRequest)
        outer = envelope("chat.completion.chunk" if chat else "text_completion", self.model.name)
        if asked.include_usage:
            outer["usage"] = None  # until the last event
        texts = [GrowingText(form, asked.stops) for _ in running]
        messages = [GrowingMessage(form) for _ in running]
        index = {id(seq): i for i, seq in enumerate(running)}
        left = len(running)
        # Starlette cancels a task only while it waits. If tokens come with every turn of the loop, this one never
        # waits, because its next token is already there. So the disconnection arrives through the same queue.
        hung_up = asyncio.ensure_future(http.receive())
        hung_up.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            opening = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for i in range(left if chat else 0):
                yield event(outer, {"index": i, **opening})
            while left:
                if (arrived := await queue.get()) is None:
                    return
                seq, token, logprob = arrived
                i = index[id(seq)]
                if token is None:
                    left -= 1
                    if rest := messages[i].finish():
                        yield event(outer, {"index": i, "delta": rest, "finish_reason": None})
                    finish = seq.finish if seq.finish in ("stop", "length") else "error"
                    body: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
                    reason = messages[i].ending(finish) if chat else finish
                    yield event(outer, {"index": i, **body, "finish_reason": reason})
                    continue
                at = len(texts[i].ids)
                last = seq.state == DONE and at + 1 == len(seq.sampled)  # then nothing is held back
                piece = texts[i].add(token, last)
                body = {"delta": messages[i].feed(piece) or {"content": ""}} if chat else {"text": piece}
                sampled = SampledTokens([token], [logprob], seq.tops[at : at + 1])
                yield event(outer, choice_of(asked, i, body, None, sampled, self.pieces))
            if asked.include_usage:
                prompts = sum(seq.prompt_len for seq in running[:: asked.n])  # samples of one prompt read it once
                counts = usage(prompts, sum(len(s.sampled) for s in running))
                yield f"data: {json.dumps({**outer, 'choices': [], 'usage': counts})}\n\n"
            yield "data: [DONE]\n\n"
        finally:  # also when the client went away
            hung_up.cancel()
            unfinished = [seq for seq in running if seq.state != DONE]
            self.counts["disconnected"] += bool(unfinished)
            for seq in unfinished:
                self.model.engine.abort(seq)
