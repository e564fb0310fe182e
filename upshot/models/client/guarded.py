"""A model whose calls are cached, budgeted, limited, retried and counted; a backend implements a single attempt.

The order of a call: response cache → free slot of the endpoint → budget → pace → attempts with backoff → counters.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack, cast

from upshot.config.model_spec import ModelSpec
from upshot.core.conversation import Message, derive_seed
from upshot.core.errors import UserError
from upshot.core.http_client import AttemptError, Retries, RetryPolicy
from upshot.core.time_limit import pause_clock
from upshot.models.base import Completion, Model, ModelCallError, Request
from upshot.models.client.budget import Budget
from upshot.models.client.cache import ResponseCache, request_key
from upshot.models.client.limits import EndpointLimits
from upshot.models.client.usage import RoleCount, UsageMeter
from upshot.models.openai_format import ApiAnswer

log = logging.getLogger(__name__)

SILENT_ATTEMPTS = 2
"""Attempts of one call that may time out before the model has answered its first call: a cold start may need a second
one, but if both time out, a third would, too."""


class Guards(TypedDict, total=False):
    """What models can share; a model creates its own if nothing is passed."""

    role: str
    """Counted when a request names none."""
    budget: Budget | None
    limits: EndpointLimits | None


class GuardedModel(Model):
    """The safe way to call: subclasses implement `_attempt`."""

    def __init__(self, spec: ModelSpec, **guards: Unpack[Guards]) -> None:
        self.name = spec.label
        self.spec = spec
        self.role = guards.get("role", "")
        self.budget = guards.get("budget") or Budget()
        self.limits = guards.get("limits") or EndpointLimits.of(spec)
        key = f"models.{self.role}." if self.role else ""
        self.way_out = f"raise {key}timeout_s ({spec.timeout_s:g} s), or lower {key}concurrency ({spec.concurrency})"
        self.meter = UsageMeter(spec.label, spec.timeout_s if self.may_be_silent else 0.0, self.way_out)
        self.answered = False
        """Whether it has answered any call of this process."""
        self.cache: ResponseCache | None = None
        self._asked: dict[bytes, int] = {}
        self._pauses: set[asyncio.Task[None]] = set()
        self._closed = False
        self._rng = random.Random()

    @abstractmethod
    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        """Ask once for n completions. `AttemptError` is retried; `ModelCallError` and `UserError` are final."""

    @property
    def identity(self) -> str:
        """The model's name in the cache: models with the same one share their answers."""
        return self.spec.label

    async def start(self) -> None:
        """Open the response cache; backends check keys and files here."""
        self._closed = False
        if self.spec.cache and self.cache is None:
            self.cache = ResponseCache.open(self.spec.cache)

    async def aclose(self) -> None:
        """Stop all waiting: calls in progress fail as 'closed'."""
        self._closed = True
        for pause in self._pauses:
            pause.cancel()
        if self.cache is not None:
            hits, requested = self.meter.cache_hits()
            if requested:
                log.info("%s: %d of %d completions came from the response cache", self.name, hits, requested)
            self.cache.close()
            self.cache = None

    def stats(self) -> dict[str, float]:
        """Calls, failures, retries, tokens, cost, latency and cache hits by role."""
        return self.meter.stats()

    @property
    def may_be_silent(self) -> bool:
        """Whether slow calls should be reported to the user; a model in this process needs no such report."""
        return self.spec.kind not in ("local", "policy")

    def state(self) -> dict[str, Any]:
        """The counters by role, latencies left out."""
        return self.meter.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue counting from a saved state."""
        self.meter.restore(state)

    @pause_clock
    async def generate(self, request: Request) -> list[Completion]:
        """`request.n` completions, or `ModelCallError` with the reason after all retries."""
        if request.by_ids and not self.abilities.ids_in:
            raise UserError(f"model '{self.name}' takes messages, not token ids")
        if request.tools and not self.abilities.tools:
            raise UserError(f"model '{self.name}' takes no tools")
        request = replace(request, sampling=self.spec.sampling(request.sampling))
        count = self.meter.role(request.role or self.role)
        if self.cache is None:
            return await self._call(request, request.n, request.sampling.seed, count)
        return await self._through_cache(self.cache, request, count)

    async def _through_cache(self, cache: ResponseCache, request: Request, count: RoleCount) -> list[Completion]:
        base = request_key(self.identity, request, self.spec.extra_body)
        first = 0
        repeatable = request.sampling.seed is not None or request.sampling.temperature == 0 or request.given > 0
        if not repeatable:
            # The same question asked again in this run wants another sample, not the first one once more.
            first = self._asked.get(base, 0)
            self._asked[base] = first + request.n
        completions = [cache.get(base, first + i) for i in range(request.n)]
        hits = [completion for completion in completions if completion is not None]
        if hits and len(hits) < request.n and repeatable:
            hits, completions = [], [None] * request.n  # samples of one seed belong together
        count.cache_hits += len(hits)
        missing = [i for i, completion in enumerate(completions) if completion is None]
        if not missing:
            return hits
        count.cache_misses += len(missing)
        fresh = await self._call(request, len(missing), request.sampling.seed, count)
        for i, completion in zip(missing, fresh, strict=True):
            cache.put(base, first + i, completion, self.identity)
            completions[i] = completion
        return [completion for completion in completions if completion is not None]

    async def _call(self, request: Request, n: int, seed: int | None, count: RoleCount) -> list[Completion]:
        """n completions; endpoints that give fewer than asked are asked again for the rest."""
        self.budget.check()
        out: list[Completion] = []
        while len(out) < n:
            part = seed if not out or seed is None else derive_seed(seed, len(out))
            self.meter.queued += 1
            try:
                await self.limits.slots.acquire()
            finally:
                self.meter.queued -= 1
            try:
                with self.meter.count_under_way(request.role or self.role):
                    out += await self._budgeted_call(request, n - len(out), part, count)
            finally:
                self.limits.slots.release()
        return out[:n]

    async def _budgeted_call(self, request: Request, n: int, seed: int | None, count: RoleCount) -> list[Completion]:
        await self.budget.admit()
        self.budget.take_call()
        count.calls += 1
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            answer = await self._attempts(request, n, seed, count)
        except ModelCallError as error:
            count.failed[error.reason] += 1
            raise
        except asyncio.CancelledError:
            count.failed["cancelled"] += 1
            raise
        finally:
            count.latencies.append(loop.time() - began)
        count.prompt_tokens += answer.prompt_tokens
        count.completion_tokens += answer.completion_tokens
        count.cost += answer.cost
        self.budget.charge(answer.prompt_tokens + answer.completion_tokens, answer.cost)
        return answer.completions

    async def _attempts(self, request: Request, n: int, seed: int | None, count: RoleCount) -> ApiAnswer:
        spec = self.spec
        retries = Retries(RetryPolicy(spec.retries, spec.backoff_s, spec.patience_s), self._rng)
        while True:
            self._check_open()
            guess = 0 if self.limits.tokens is None else self._token_guess(request, n)
            await self.limits.pace(guess)
            try:
                answer = await self._attempt(request, n, seed)
            except AttemptError as error:
                self._check_open()
                wait = retries.next_wait(error)
                never_met = error.reason == "timeout" and not self.answered and retries.attempts >= SILENT_ATTEMPTS
                if wait is None or never_met:
                    message = f"'{self.name}' after {retries.attempts} attempts: {error.detail}"
                    if error.reason == "timeout":
                        message += f"{', as with every call so far' if never_met else ''}; {self.way_out}"
                    raise ModelCallError(error.reason, message) from error
                count.retries[error.reason] += 1
                log.debug("%s: %s (%s); again in %.2f s", self.name, error.reason, error.detail, wait)
                await self._pause(wait)
                continue
            self.answered = True
            if self.limits.tokens is not None:
                self.limits.tokens.correct(answer.prompt_tokens + answer.completion_tokens - guess)
            return answer

    def _check_open(self) -> None:
        if self._closed:
            raise ModelCallError("closed", f"model '{self.name}' was closed during the call")

    async def _pause(self, seconds: float) -> None:
        """Sleep that `aclose` ends."""
        pause = asyncio.create_task(asyncio.sleep(seconds))
        self._pauses.add(pause)
        try:
            await asyncio.wait([pause])
        finally:
            pause.cancel()
            self._pauses.discard(pause)

    @staticmethod
    def _token_guess(request: Request, n: int) -> int:
        if request.by_ids:
            prompt = len(request.prompt)
        else:
            prompt = sum(len(message.content) for message in cast("Sequence[Message]", request.prompt)) // 4
        return prompt + n * request.sampling.max_tokens
