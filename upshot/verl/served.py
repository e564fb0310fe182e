"""The policy behind a cluster's servers, as a `Model`: exact ids in, exact ids out.

A server manager is anything with verl's `generate(request_id, *, prompt_ids, sampling_params)`; nothing here imports
verl. Each conversation has its own `ConversationLink`. Its id sends all its calls, including those of its futures, to
the server that has its prefix in memory.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from upshot.config.sampling import Sampling
from upshot.core.conversation import derive_seed
from upshot.core.errors import UserError
from upshot.models.base import Abilities, Completion, Model, ModelCallError, Request
from upshot.models.openai_format import cut_at_stop
from upshot.models.rendering import Renderer

TRAINED = "policy"
"""The role of calls whose tokens are trained; the server's extra fields for them go into the trajectory."""
FAILED = ("aborted", "abort", "error")
"""Stop reasons of a server that gave up; 'completed' means ended turns and cut turns alike."""


class TokenOutput(Protocol):
    """A server's answer."""

    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    stop_reason: str | None
    extra_fields: Mapping[str, Any]


class ServerManager(Protocol):
    """Sends requests to servers; the same id always goes to the same server."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput: ...


@dataclass
class ConversationLink:
    """The connection of one conversation."""

    manager: ServerManager
    request_id: str
    params: Mapping[str, Any] = field(default_factory=dict)
    """verl's own sampling parameters (logprobs, repetition_penalty …), which ours override."""
    seeded: bool = False
    """Whether every call carries its seed. With it, our engine samples what local mode would sample; other servers
    would only become slower."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The servers' extra fields for the trained tokens: which weights sampled them."""

    def note(self, fields: Mapping[str, Any]) -> None:
        """Keep a server's extra fields; of `min_…` fields the smallest value, of `max_…` fields the largest."""
        for name, value in fields.items():
            known = self.extra.get(name)
            if known is not None and value is not None and name.startswith(("min_", "max_")):
                value = min(known, value) if name.startswith("min_") else max(known, value)
            self.extra[name] = value


_link: ContextVar[ConversationLink] = ContextVar("link")


@contextmanager
def use_link(link: ConversationLink) -> Iterator[None]:
    """Inside, all calls go over this link, including those of tasks started there."""
    token = _link.set(link)
    try:
        yield
    finally:
        _link.reset(token)


class ServedModel(Model):
    """The model in training on verl's servers; one object serves all conversations of a worker."""

    abilities = Abilities(ids_in=True, ids_out=True)

    def __init__(self, renderer: Renderer) -> None:
        self.name, self.renderer, self.tokenizer = "policy", renderer, renderer.tokenizer

    async def generate(self, request: Request) -> list[Completion]:
        """`request.n` completions over the link of the calling conversation."""
        link = _link.get(None)
        if link is None:
            raise UserError(f"model '{self.name}' runs on verl's servers and cannot be called outside a conversation")
        prompt = self._prompt_ids(request)
        return list(await asyncio.gather(*(self._one(link, prompt, request, number) for number in range(request.n))))

    async def _one(self, link: ConversationLink, prompt: list[int], request: Request, number: int) -> Completion:
        # The template's end tokens as well: the servers use the model's settings, which may not contain them.
        ends = {*self.renderer.end_ids, *request.sampling.stop_ids}
        params = {**link.params, **sampling_params(request.sampling), "stop_token_ids": sorted(ends)}
        if link.seeded and request.sampling.seed is not None:
            params["seed"] = derive_seed(request.sampling.seed, "request", number) if number else request.sampling.seed
        answer = await link.manager.generate(link.request_id, prompt_ids=list(prompt), sampling_params=params)
        if request.role == TRAINED:
            link.note(answer.extra_fields or {})
        ids = tuple(int(i) for i in answer.token_ids)
        if not ids or answer.stop_reason in FAILED:
            raise ModelCallError("aborted", f"a server gave {len(ids)} ids (stop reason '{answer.stop_reason}')")
        if answer.log_probs is None or len(answer.log_probs) != len(ids):
            count = "none" if answer.log_probs is None else len(answer.log_probs)
            raise UserError(
                f"a server gave {len(ids)} ids and {count} log-probabilities; "
                "set actor_rollout_ref.rollout.calculate_log_probs=True"
            )
        ids, text, stopped = self._until(ids, request.sampling.stop)
        return Completion(
            text=text,
            finish="stop" if stopped or ids[-1] in ends else "length",
            ids=ids,
            logprobs=tuple(float(value) for value in answer.log_probs[: len(ids)]),
            prompt_tokens=len(prompt),
            completion_tokens=len(ids),
            version=int((answer.extra_fields or {}).get("global_steps") or 0),
        )

    def _until(self, ids: tuple[int, ...], stops: Sequence[str]) -> tuple[tuple[int, ...], str, bool]:
        """The ids up to the first stop string, the text before it, and whether there is one.

        The servers sample to the end of the turn or the limit, because all of them understand only ids.
        """
        whole = self.renderer.decode(ids)
        text, stopped = cut_at_stop(whole, stops)
        if not stopped:
            return ids, text, False
        need = len(text) + min(len(stop) for stop in stops if whole.startswith(stop, len(text)))
        enough = bisect_left(range(len(ids)), need, lo=1, key=lambda n: len(self.renderer.decode(ids[:n])))
        return ids[:enough], text, True  # the fewest ids that spell it

    def _prompt_ids(self, request: Request) -> list[int]:
        if request.given:
            raise UserError(
                f"model '{self.name}' runs on verl's servers; they report no log-probabilities of given ids"
            )
        if request.by_ids:
            return [int(i) for i in request.prompt]  # type: ignore[arg-type]
        return self.renderer.prompt_ids(request.prompt, request.tools)  # type: ignore[arg-type]


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """Sampling parameters under the servers' names; for them, −1 means 'all tokens'."""
    out: dict[str, Any] = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
    out |= {"top_p": sampling.top_p, "top_k": sampling.top_k or -1}
    if sampling.min_p:
        out["min_p"] = sampling.min_p
    return out
