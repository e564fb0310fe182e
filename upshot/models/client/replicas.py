"""One model at several addresses: each call goes to one of them, and to another if that fails.

To the rest of the program it is one endpoint: cache, budget, pace, retries and counters are those of any guarded model.
A request is the same for every replica, including its seed. Two replicas are never asked at once; a replica that hangs
holds its calls until their timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Unpack

from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError
from upshot.core.http_client import AttemptError, backoff
from upshot.models.base import Abilities, ModelCallError, Request
from upshot.models.client.guarded import GuardedModel, Guards
from upshot.models.client.routing import Replica, Routing, prefix_key
from upshot.models.client.usage import RoleCount
from upshot.models.endpoint import check_price
from upshot.models.openai_format import ApiAnswer

log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""Seconds between two checks of a file of addresses."""


class ReplicatedModel(GuardedModel):
    """A model over the models at its addresses; `open_one` makes the one of an address."""

    def __init__(
        self, spec: ModelSpec, open_one: Callable[[ModelSpec], GuardedModel], routing: Routing, **guards: Unpack[Guards]
    ) -> None:
        super().__init__(spec, **guards)
        self.routing, self._open_one = routing, open_one
        self._members: dict[str, asyncio.Task[GuardedModel]] = {}
        """The model of each address, opened by the first call there; a failed task is removed."""
        self._likeness: tuple[str, ...] | None = None
        """Served name and abilities that every member must have; known once the first ones are open."""
        self._watch_task: asyncio.Task[None] | None = None

    @property
    def identity(self) -> str:
        """The sorted addresses and the served name; it does not matter which replica answers."""
        served = self._likeness[0] if self._likeness else ""
        where = self.spec.url if isinstance(self.spec.url, str) else ",".join(sorted(self.spec.url or ()))
        return f"{where}#{self.spec.model or served}"

    async def start(self) -> None:
        """Open every replica that can be reached; `UserError` if none can."""
        await super().start()
        check_price(self)
        try:
            await self._open_all(read_addresses(self.spec.url))
        except BaseException:
            await self.aclose()
            raise
        if isinstance(self.spec.url, str):
            self._watch_task = asyncio.create_task(self._watch_file())

    async def aclose(self) -> None:
        """Abort the calls in flight and close all connections."""
        await super().aclose()
        self.routing.notify()  # wake up calls that wait for a place
        if self._watch_task is not None:
            self._watch_task.cancel()
            self._watch_task = None
        tasks, self._likeness = list(self._members.values()), None
        for task in tasks:
            task.cancel()
        opened = await asyncio.gather(*tasks, return_exceptions=True)
        self._members.clear()
        await asyncio.gather(*(model.aclose() for model in opened if isinstance(model, GuardedModel)))

    def stats(self) -> dict[str, float]:
        """The usual counters, and how many replicas are up."""
        prefix = f"{self.role}/" if self.role else ""
        return super().stats() | {f"{prefix}replicas_up": self.routing.up}

    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        """Call one replica, then the others that are up, until one answers."""
        count = self.meter.role(request.role or self.role)
        key = prefix_key(request)
        tried: set[str] = set()
        while True:
            self._check_open()
            replica = self.routing.take(key, tried)
            if replica is None:
                await self.routing.change.wait()
                continue
            tried.add(replica.url)
            try:
                return await self._ask(replica, request, n, seed, count)
            except AttemptError as error:
                if self._closed or not self.routing.open_to_calls(tried):
                    raise
                count.retries[error.reason] += 1
                log.debug("%s: %s at %s; asking another", self.name, error.reason, replica.url)
            finally:
                self.routing.leave(replica)

    async def _ask(self, replica: Replica, request: Request, n: int, seed: int | None, count: RoleCount) -> ApiAnswer:
        """One attempt at one replica, and what it means for the replica's breaker."""
        name = short_name(replica.url)
        count.replicas[f"{name}/calls"] += 1
        try:
            model = await self._member(replica.url)
            answer = await model._attempt(request, n, seed)
        except AttemptError as error:
            count.replicas[f"{name}/failed"] += 1
            if self.routing.record_failure(replica, error):
                count.replicas[f"{name}/opened"] += 1
                log.warning(
                    "%s: %s gets no requests for now (%s: %s)", self.name, replica.url, error.reason, error.detail
                )
            raise
        except (ModelCallError, UserError):  # it is up, although it refused the call
            if not self._closed:
                replica.record_answer()
            raise
        replica.record_answer()
        if request.schema is not None:  # it may have found out that it takes none
            self.abilities = self._common_abilities()
        return answer

    async def _member(self, url: str) -> GuardedModel:
        """The model at an address; all who wait for it to open share the outcome."""
        if url not in self._members:
            task = self._members[url] = asyncio.create_task(self._open(url))
            task.add_done_callback(lambda done: _failed(done) and self._members.pop(url, None))
        try:
            return await asyncio.shield(self._members[url])
        except asyncio.CancelledError:
            self._check_open()  # `aclose` cancels what is being opened; else we are cancelled ourselves
            raise

    async def _open(self, url: str) -> GuardedModel:
        """Start the model of an address; if that fails, or it differs from the others, the attempt has failed."""
        model = self._open_one(self.spec.at(url))
        try:
            await model.start()
            if self._likeness not in (None, likeness(model)):
                raise UserError(f"'{model.name}' differs from other replicas: {likeness(model)}, not {self._likeness}")
        except BaseException as error:
            await model.aclose()
            if isinstance(error, UserError):
                raise AttemptError("connection", str(error)) from error
            raise
        return model

    async def _open_all(self, urls: tuple[str, ...]) -> None:
        """Open the replicas that can be opened and continue without the others; `UserError` if none can or they
        differ."""
        self.routing.update(urls)
        for attempt in range(self.spec.retries + 1):
            outcomes = await asyncio.gather(*map(self._member, urls), return_exceptions=True)
            failures: dict[str, AttemptError] = {}
            for url, outcome in zip(urls, outcomes, strict=True):
                if isinstance(outcome, AttemptError):
                    failures[url] = outcome
                elif isinstance(outcome, BaseException):
                    raise outcome
            if len(failures) < len(urls):
                break
            if attempt < self.spec.retries:
                await self._pause(backoff(attempt, self.spec.backoff_s, self._rng))
        else:
            raise UserError(f"no replica of '{self.name}' can be used: {failures[urls[0]]}")
        self._likeness = common_likeness(self._list_open())
        self.abilities = self._common_abilities()
        for url, error in failures.items():
            log.warning("%s continues without a replica: %s", self.name, error)
            self.routing.put_out(url)

    def _list_open(self) -> list[GuardedModel]:
        return [task.result() for task in self._members.values() if task.done() and not _failed(task)]

    def _common_abilities(self) -> Abilities:
        """What all of them can do."""
        every = [model.abilities for model in self._list_open()]
        return Abilities(**{f.name: all(getattr(a, f.name) for a in every) for f in fields(Abilities)})

    async def _watch_file(self) -> None:
        """Follow the file of addresses; while it cannot be read, the replicas stay as they are."""
        trouble = ""
        while True:
            await asyncio.sleep(REFRESH_S)
            before, trouble = trouble, ""
            try:
                urls = read_addresses(self.spec.url)
            except UserError as error:
                trouble = str(error)
                if trouble != before:
                    log.warning("%s: %s; the replicas stay as they are", self.name, trouble)
                continue
            if urls != tuple(self.routing.replicas):
                log.info("%s: the replicas are now %s", self.name, ", ".join(urls))
                self.routing.update(urls)


def _failed(task: asyncio.Task[GuardedModel]) -> bool:
    return task.cancelled() or task.exception() is not None


def likeness(model: GuardedModel) -> tuple[str, ...]:
    """The served name, where the spec leaves it open, and what it can do (schemas are found out by trying)."""
    name = "" if model.spec.model else str(getattr(model, "served", ""))
    return name, *(f.name for f in fields(Abilities) if f.name != "schema" and getattr(model.abilities, f.name))


def common_likeness(models: list[GuardedModel]) -> tuple[str, ...]:
    """What all of them have in common: requests and answers must not depend on which one answers."""
    names = {likeness(model): model.name for model in models}
    if len(names) > 1:
        (first, a), (second, b), *_ = names.items()
        raise UserError(
            f"the replicas '{a}' {first} and '{b}' {second} differ; serve the same model with the same server, or set "
            "'model' and 'token_ids' for all of them"
        )
    return next(iter(names))


def read_addresses(url: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The URLs, each once. A file holds one a line; empty lines and those that begin with '#' are skipped."""
    if not isinstance(url, str):
        return url or ()
    try:
        lines = Path(url).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read '{url}' ({error}); 'url' is an address that begins with http:// or https://, a list of "
            "such, or a file with one per line"
        ) from error
    stripped = [line.strip().rstrip("/") for line in lines]
    addresses = tuple(dict.fromkeys(line for line in stripped if line and not line.startswith("#")))
    for line in addresses:
        if not line.startswith(("http://", "https://")):
            raise UserError(f"'{url}' names the replica '{line}', which is not a URL such as 'http://host:8000/v1'")
    if not addresses:
        raise UserError(f"'{url}' lists no replica; write one address per line: 'http://host:8000/v1'")
    return addresses


def short_name(url: str) -> str:
    """An address as the counters call it."""
    return url.partition("://")[2].partition("#")[0].removesuffix("/v1")
