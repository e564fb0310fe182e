"""The engine as a `Model`: messages or ids in, text, ids and log-probabilities out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.errors import UserError
from upshot.engine.engine import Engine, QueueFull, Token
from upshot.engine.sequence import Rules
from upshot.engine.sequence import Sequence as Running
from upshot.models import grammar as grammars
from upshot.models.base import Completion, Model, ModelCallError, Request
from upshot.models.openai_format import cut_at_stop
from upshot.models.rendering import Renderer
from upshot.models.tokens import decoder_of

CHARACTERS_PER_ID = 32
"""More than ordinary text has on average (prose has 4, deeply indented code 10)."""


class EngineModel(Model):
    """A live transformers model behind the model interface."""

    def __init__(self, engine: Engine, tokenizer: Any, name: str = "engine", renderer: Renderer | None = None) -> None:
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self._decode = decoder_of(tokenizer)
        if renderer is None and getattr(tokenizer, "chat_template", None):
            renderer = Renderer(tokenizer)
        self.renderer = renderer
        ends = {*engine.eos_ids, tokenizer.eos_token_id, *(renderer.end_ids if renderer is not None else ())}
        self.end_ids: set[int] = ends - {None}
        self._compiler: grammars.SchemaCompiler | None = None
        self.abilities, self.no_schema = grammars.local_abilities(), grammars.missing_library()
        self.calls = 0

    async def generate(self, request: Request, on_token: Token | None = None) -> list[Completion]:
        """`request.n` completions from the current weights; `on_token` is called with each token when it is sampled."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = 1 if request.given else request.n

        def finished(_: Running) -> None:
            nonlocal left
            left -= 1
            if left == 0 and not done.done():
                done.set_result(None)

        seqs = self.submit(request, on_token, finished)
        try:
            await done
        except asyncio.CancelledError:
            for seq in seqs:
                self.engine.abort(seq)
            raise
        return [self.completion(seq, request.sampling) for seq in seqs]

    async def generate_all(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """The completions of every request; if one fails, the others are aborted."""
        tasks = [asyncio.ensure_future(self.generate(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def submit(
        self, request: Request, on_token: Token | None = None, on_done: Callable[[Running], None] | None = None
    ) -> list[Running]:
        """Queue a request without waiting for it."""
        self.calls += 1
        ids = self.prompt_ids(request)
        if len(ids) >= self.engine.shape.max_length:
            room = self.engine.shape.max_length
            raise ModelCallError("too_long", f"the prompt has {len(ids)} ids, but the model's context holds {room}")
        grammar = self._grammar(request)
        try:
            if scored := request.given:
                seqs = [self.engine.score(ids[:-scored], ids[-scored:], request.top_logprobs, on_done)]
            else:
                seqs = self.engine.submit(ids, self.rules(request), request.n, grammar, on_token, on_done)
        except QueueFull as error:
            raise ModelCallError("rate_limited", str(error)) from error
        self.engine.wake()
        return seqs

    def prompt_ids(self, request: Request) -> list[int]:
        """The ids to continue."""
        if request.by_ids:
            return list(request.prompt)  # type: ignore[arg-type]
        if self.renderer is None:
            raise UserError(f"model '{self.name}' has no chat template; give token ids as the prompt")
        text = self.renderer.prompt_text(request.prompt, request.tools)  # type: ignore[arg-type]
        return self.encode(text, self.renderer.encode)

    def encode(self, text: str, encoder: Callable[[str], list[int]] | None = None) -> list[int]:
        """The ids of a text; one that cannot fit is refused before it is tokenised, which takes 1 s and 100 MB per MB.

        encoder: None: the tokenizer's own, which adds the tokens that it puts before every text.
        """
        self.check_size(len(text) // CHARACTERS_PER_ID, f"{len(text)} characters")
        return (encoder or self.tokenizer.encode)(text)

    def check_size(self, ids: int, what: str) -> None:
        """Refuse a prompt that has at least this many ids where the context takes fewer; `what` describes its size."""
        room = self.engine.shape.max_length
        if ids > room:
            raise ModelCallError("too_long", f"the prompt has {what}, but the model's context holds {room} ids")

    def check_queue(self, more: int) -> None:
        """Refuse `more` sequences if the queue has no room for all of them."""
        waiting, most = len(self.engine.scheduler.waiting), self.engine.settings.max_waiting
        if waiting + more > most:
            raise ModelCallError("rate_limited", f"{waiting} of at most {most} sequences wait; {more} more do not fit")

    def rules(self, request: Request) -> Rules:
        """The request's sampling in the engine's terms."""
        sampling = request.sampling
        if "" in sampling.stop:
            raise UserError("a stop string is empty: it would end every text before its first character")
        drawn = (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        seed = self.engine.fresh_seed() if sampling.seed is None else sampling.seed
        stopped = self._stop_check(sampling.stop) if sampling.stop else None
        return Rules(*drawn, seed, frozenset(sampling.stop_ids) | self.end_ids, request.top_logprobs, stopped)

    def _stop_check(self, stops: tuple[str, ...]) -> Callable[[list[int]], bool]:
        # A token has at least one byte unless it is special, so this many last ids hold any stop string.
        need = max(len(stop.encode()) for stop in stops) + 8

        def stopped(ids: list[int]) -> bool:
            reach, tail = need, ""
            while True:
                tail = self.tokenizer.decode(ids[-reach:], skip_special_tokens=True)
                if reach >= len(ids) or len(tail.encode()) >= need:
                    return any(stop in tail for stop in stops)
                reach *= 2  # because of special tokens, whose text is left out

        return stopped

    def _grammar(self, request: Request) -> Any:
        """The grammar that the text must follow, if there is one."""
        if request.schema is None and not request.lark:
            return None
        if not grammars.available():
            what = "a tool_choice that demands a call" if request.lark else "a JSON schema"
            raise UserError(f"{what} needs the library llguidance: {grammars.INSTALL}")
        if self._compiler is None:
            self._compiler = grammars.SchemaCompiler(self.tokenizer, self.engine.shape.vocab, self.end_ids)
        return self._compiler.lark(request.lark) if request.schema is None else self._compiler.grammar(request.schema)

    def completion(self, seq: Running, sampling: Sampling) -> Completion:
        """The completion of a finished sequence."""
        if seq.finish in ("error", "abort"):
            raise ModelCallError("engine_error" if seq.error else "aborted", str(seq.error or "")) from seq.error
        ids, logprobs = tuple(seq.sampled), tuple(seq.logprobs)
        tops = tuple(seq.tops) if seq.rules.top_logprobs else None
        if seq.given:
            return Completion("", seq.finish, ids, logprobs, (), len(seq.ids), version=seq.version, top_logprobs=tops)
        text, finish = self._decode(seq.sampled, skip_special_tokens=True), seq.finish
        if sampling.stop:
            text, stopped = cut_at_stop(text, sampling.stop)
            finish = "stop" if stopped else finish
        counts = (seq.prompt_len, len(ids))
        return Completion(text, finish, ids, logprobs, (), *counts, version=seq.version, top_logprobs=tops)

    async def aclose(self) -> None:
        """Abort all requests."""
        await self.engine.aclose()

    def stats(self) -> dict[str, float]:
        """The engine's counters."""
        return {"calls": self.calls, **self.engine.stats()}
