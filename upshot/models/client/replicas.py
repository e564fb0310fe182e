"""One model at several addresses: each call goes to one of them, and to another when that one fails or is late.

To the rest of the program it is one endpoint: cache, budget, pace, retries and counters are those of any guarded model.
What is asked is the same wherever it is asked, seed included.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError
from upshot.models.base import ModelCallError, Request
from upshot.models.client.addresses import read_addresses
from upshot.models.client.budget import Budget
from upshot.models.client.guarded import AttemptFailed, GuardedModel
from upshot.models.client.limits import EndpointLimits, backoff
from upshot.models.client.members import Members
from upshot.models.client.routing import ReplicaSlot, Routing, prefix_key
from upshot.models.client.usage import RoleCount
from upshot.models.endpoint import check_price
from upshot.models.openai_format import ApiAnswer

log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""How often a file of addresses is looked at."""


LOOK_S = 0.2
"""How often a late call looks for a second replica, where it found none."""


class ReplicatedModel(GuardedModel):
    """A model over the models at its addresses."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        routing: Routing,
        members: Members,
        role: str = "",
        budget: Budget | None = None,
        limits: EndpointLimits | None = None,
    ) -> None:
        super().__init__(spec, role=role, budget=budget, limits=limits)
        self.routing = routing
        self.members = members
        self._watching: asyncio.Task[None] | None = None

    @property
    def identity(self) -> str:
        """The addresses in any order, and the served name; whichever of them answers."""
        served = self.members.likeness[0] if self.members.likeness else ""
        where = self.spec.url if isinstance(self.spec.url, str) else ",".join(sorted(self.spec.url or ()))
        return f"{where}#{self.spec.model or served}"

    async def start(self) -> None:
        """Open every replica that can be reached; `UserError` when none can."""
        await super().start()
        check_price(self)
        try:
            await self._open_all(self._addresses())
        except BaseException:
            await self.aclose()
            raise
        if isinstance(self.spec.url, str):
            self._watching = asyncio.create_task(self._watch())

    async def aclose(self) -> None:
        """Break off the calls under way and close all connections."""
        await super().aclose()
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
        await self.members.aclose()

    def stats(self) -> dict[str, float]:
        """The usual counters, and how many replicas are up."""
        prefix = f"{self.role}/" if self.role else ""
        return super().stats() | {f"{prefix}replicas_up": self.routing.up}

    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        """Ask one replica, then each other one that is up, until one answers."""
        count = self.meter.role(request.role or self.role)
        key = prefix_key(request)
        tried: set[str] = set()
        while True:
            place = await self._enter(key, tried)
            tried.add(place.replica.url)
            try:
                return await self._hedged(request, n, seed, key, place, tried, count)
            except AttemptFailed as failure:
                if self._closed or not self.routing.others(tried):
                    raise
                count.retries[failure.reason] += 1
                log.debug("%s: %s at %s; asking another", self.name, failure.reason, place.replica.url)

    async def _enter(self, key: bytes, avoid: set[str]) -> ReplicaSlot:
        waiting = self.routing.enter(key, frozenset(avoid))
        self._pauses.add(waiting)
        try:
            place = await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and (granted := waiting.result()) is not None:
                self.routing.leave(granted)
            raise
        finally:
            self._pauses.discard(waiting)
        if place is None:
            raise ModelCallError("closed", f"model '{self.name}' was closed during the call")
        return place

    async def _hedged(
        self,
        request: Request,
        n: int,
        seed: int | None,
        key: bytes,
        place: ReplicaSlot,
        tried: set[str],
        count: RoleCount,
    ) -> ApiAnswer:
        """The answer of a replica, or of a second one if the first is late and the second is faster."""
        patience = self.routing.hedge_after(request.role or self.role)
        if patience is None:
            return await self._ask(request, n, seed, place, count)
        first = asyncio.create_task(self._ask(request, n, seed, place, count))
        running, second = {first}, None
        try:
            await asyncio.wait(running, timeout=patience)
            while not first.done() and (second := self.routing.hedge(key, tried, place)) is None:
                await asyncio.wait(running, timeout=LOOK_S)
            if second is not None:
                count.hedges += 1
                tried.add(second.replica.url)
                running.add(asyncio.create_task(self._ask(request, n, seed, second, count)))
            answered = await _first_answer(running)
            if answered is not first:
                count.hedges_won += 1
                self._overtaken(place, count)
            return answered.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for held in (place, second):  # a task cancelled before its first step has not left
                if held is not None:
                    self.routing.leave(held)

    def _overtaken(self, place: ReplicaSlot, count: RoleCount) -> None:
        """Another replica was asked later and answered first."""
        if self.routing.overtaken(place):
            count.replicas[f"{short_name(place.replica.url)}/opened"] += 1
            log.warning("%s: %s is out (its last calls were answered sooner by others)", self.name, place.replica.url)

    async def _ask(self, request: Request, n: int, seed: int | None, place: ReplicaSlot, count: RoleCount) -> ApiAnswer:
        """One attempt at one replica, with its verdict on that replica."""
        name = short_name(place.replica.url)
        count.replicas[f"{name}/calls"] += 1
        try:
            if self._closed:
                raise ModelCallError("closed", f"model '{self.name}' was closed during the call")
            model = await self.members.get(place.replica.url)
            answer = await model._attempt(request, n, seed)
        except AttemptFailed as failure:
            count.replicas[f"{name}/failed"] += 1
            if self.routing.failed(place, failure):
                count.replicas[f"{name}/opened"] += 1
                log.warning("%s: %s is out (%s: %s)", self.name, place.replica.url, failure.reason, failure.detail)
            raise
        except (ModelCallError, UserError):
            if not self._closed:
                self.routing.answered(place)
            raise
        else:
            self.routing.succeeded(place, request.role or self.role)
            if request.schema is not None:  # it may have learned that it takes none
                self.abilities = self.members.abilities()
            return answer
        finally:
            self.routing.leave(place)

    def _addresses(self) -> tuple[str, ...]:
        return read_addresses(cast("str | tuple[str, ...]", self.spec.url))

    async def _open_all(self, urls: tuple[str, ...]) -> None:
        self.routing.update(urls)
        for attempt in range(self.spec.retries + 1):
            failures = await self.members.get_all(urls)
            if len(failures) < len(urls):
                break
            if attempt < self.spec.retries:
                await self._pause(backoff(attempt, self.spec.backoff_s, self._rng))
        else:
            raise UserError(f"no replica of '{self.name}' can be used: {failures[urls[0]]}")
        self.abilities = self.members.abilities()
        for url, failure in failures.items():
            log.warning("%s goes on without a replica: %s", self.name, failure)
            self.routing.trip(url)

    async def _watch(self) -> None:
        """Follow the file of addresses; while it cannot be read, the replicas stay as they are."""
        trouble = ""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                urls = self._addresses()
            except UserError as error:
                if str(error) != trouble:
                    log.warning("%s: %s; the replicas stay as they are", self.name, error)
                trouble = str(error)
                continue
            trouble = ""
            if urls != tuple(self.routing.replicas):
                log.info("%s: the replicas are now %s", self.name, ", ".join(urls))
                self.routing.update(urls)


async def _first_answer(running: set[asyncio.Task[ApiAnswer]]) -> asyncio.Task[ApiAnswer]:
    """The first task that answers; the failure of all of them, or one that no other try would mend, is raised."""
    waiting = set(running)
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return task
        for task in done:
            if not waiting or not isinstance(task.exception(), AttemptFailed):
                task.result()


def short_name(url: str) -> str:
    """An address as the counters call it."""
    return url.partition("://")[2].partition("#")[0].removesuffix("/v1")
