"""The models at the addresses of a replicated one: opened when first needed, and all alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields

from upshot.config.model_spec import ModelSpec
from upshot.core.errors import UserError
from upshot.models.base import Abilities, ModelCallError
from upshot.models.client.guarded import AttemptFailed, GuardedModel


class Members:
    """One started model an address; `open_one` makes it."""

    def __init__(self, spec: ModelSpec, open_one: Callable[[ModelSpec], GuardedModel]) -> None:
        self.spec = spec
        self.likeness: tuple[str, ...] | None = None
        """What every member must be like; known once the first ones are open."""
        self._open_one = open_one
        self._models: dict[str, GuardedModel] = {}
        self._opening: dict[str, asyncio.Task[GuardedModel]] = {}

    async def get(self, url: str) -> GuardedModel:
        """The model at an address; one that cannot be started, or is unlike the others, is a failed attempt."""
        if url in self._models:
            return self._models[url]
        if url not in self._opening:  # all who wait for it share the outcome
            self._opening[url] = asyncio.create_task(self._open(url))
            self._opening[url].add_done_callback(lambda task: self._opened(url, task))
        task = self._opening[url]
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by `aclose`
                raise ModelCallError("closed", f"model '{self.spec.label}' was closed during the call") from None
            raise

    async def get_all(self, urls: tuple[str, ...]) -> dict[str, AttemptFailed]:
        """Open what can be opened; what went wrong at the others. `UserError` when those that are open differ."""
        outcomes = await asyncio.gather(*map(self.get, urls), return_exceptions=True)
        failures: dict[str, AttemptFailed] = {}
        for url, outcome in zip(urls, outcomes, strict=True):
            if isinstance(outcome, AttemptFailed):
                failures[url] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        if self._models:
            self.likeness = self._common()
        return failures

    def abilities(self) -> Abilities:
        """What all of them can do."""
        every = [model.abilities for model in self._models.values()]
        return Abilities(**{f.name: all(getattr(a, f.name) for a in every) for f in fields(Abilities)})

    async def aclose(self) -> None:
        """Close all connections."""
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        models, self._models, self.likeness = self._models, {}, None
        await asyncio.gather(*(model.aclose() for model in models.values()))

    def _opened(self, url: str, task: asyncio.Task[GuardedModel]) -> None:
        del self._opening[url]
        if not task.cancelled():
            task.exception()  # told to those who wait, if there still are any

    async def _open(self, url: str) -> GuardedModel:
        model = self._open_one(self.spec.at(url))
        try:
            await model.start()
            if self.likeness not in (None, likeness(model)):
                raise UserError(f"'{model.name}' is unlike the other replicas: {likeness(model)}, not {self.likeness}")
        except BaseException as error:
            await model.aclose()
            if isinstance(error, UserError):
                raise AttemptFailed("connection", str(error)) from error
            raise
        self._models[url] = model
        return model

    def _common(self) -> tuple[str, ...]:
        """What they are like; what is asked, and what comes back, must not hang on who answers."""
        found = {likeness(model): model.name for model in self._models.values()}
        if len(found) > 1:
            (one, a), (other, b), *_ = found.items()
            raise UserError(
                f"the replicas '{a}' {one} and '{b}' {other} differ; serve the same model by the same server, or say "
                "what holds for all with 'model' and 'token_ids'"
            )
        return next(iter(found))


def likeness(model: GuardedModel) -> tuple[str, ...]:
    """The served name, where the spec leaves it open, and what it can do (schemas are found out by trying)."""
    name = "" if model.spec.model else str(getattr(model, "served", ""))
    can = (f.name for f in fields(Abilities) if f.name != "schema" and getattr(model.abilities, f.name))
    return name, *can
