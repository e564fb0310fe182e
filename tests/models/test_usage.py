"""Slow endpoints are reported: who waits, how long, and what was retried."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.patience import until
from tests.tasks.participants.speakers import speaker
from upshot.config.model_spec import ModelSpec
from upshot.core.conversation import Message
from upshot.core.http_client import AttemptError
from upshot.models.base import Model, Request
from upshot.models.client.usage import watch
from upshot.models.openai_format import ApiAnswer
from upshot.models.scripted import ScriptedModel
from upshot.rollout.services import assemble

ASK = Request([Message("user", "?")])


class Slow(ScriptedModel):
    """Times out twice, then hangs until it is released."""

    def __init__(self, **limits: object) -> None:
        spec = ModelSpec.model_validate({"model": "scripted:ok", "backoff_s": 0.001, **limits})
        super().__init__(spec, lambda request: "yes")
        self.left = 2
        self.free = asyncio.Event()

    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        if self.left:
            self.left -= 1
            raise AttemptError("timeout", "no answer within 1 s")
        await self.free.wait()
        return await super()._attempt(request, n, seed)


def test_calls_in_flight_queued_slow_and_retried_are_reported_as_they_happen(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> Slow:
        model = Slow(concurrency=2)
        watching = asyncio.create_task(watch(lambda: [model.meter], every_s=0.05))
        async with model:
            calls = [asyncio.create_task(model.generate(ASK)) for _ in range(5)]
            await until(lambda: caplog.text.count("waiting for") >= 2)
            assert (model.meter.under_way, model.meter.queued) == (2, 3)
            model.free.set()
            await asyncio.gather(*calls)
        watching.cancel()
        return model

    model = asyncio.run(go())
    first, *others = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
    told = "2 calls in progress, 3 queued, the slowest for N s, retried or failed: timeout 2"
    assert (
        re.sub(r"for \d+ s", "for N s", first)
        == f"waiting for scripted:ok: {told}; raise timeout_s (120 s), or lower concurrency (2)"
    )
    assert others and all("retried" not in line for line in others), "what was said is not said again"
    assert (model.meter.under_way, model.meter.queued, model.meter.slowest) == (0, 0, 0.0)


def test_nothing_is_reported_while_everything_answers(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        model = speaker(lambda request: "yes")
        watching = asyncio.create_task(watch(lambda: [model.meter], every_s=0.01))
        async with model:
            for _ in range(5):
                await model.generate(ASK)
                await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(go())
    assert "waiting for" not in caplog.text


def test_every_verb_that_starts_services_reports_slow_endpoints(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training, building data, evaluating, scoring and `upshot.reward` all use these services."""
    from upshot.rollout import services as room

    monkeypatch.setattr(room, "watch", lambda look: watch(look, every_s=0.02))

    async def go() -> None:
        model = Slow()
        model.left = 1
        async with assemble(None, {"judge": model}) as services:
            await model.start()
            call = asyncio.create_task(services.models["judge"].generate(ASK))
            await asyncio.sleep(0.1)
            model.free.set()
            await call
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "the watch ends with the services"

    asyncio.run(go())
    assert "waiting for scripted:ok: 1 calls in progress" in caplog.text


def test_roles_that_share_an_endpoint_are_counted_separately() -> None:
    async def go() -> dict[str, float]:
        spec = {"model": "scripted:echo", "concurrency": 3}
        async with assemble(None, {"user": spec, "judge": spec, "watcher": "scripted:echo"}) as services:
            models: dict[str, Model] = services.models
            assert models["user"] is models["judge"]
            for role, calls in (("user", 2), ("judge", 3)):
                for _ in range(calls):
                    await models[role].generate(Request([Message("user", "?")], role=role))
            await models["watcher"].generate(Request([Message("user", "?")], role="monitor"))
            return services.stats()

    calls = {key: value for key, value in asyncio.run(go()).items() if key.endswith("/calls")}
    assert calls == {"model/user/user/calls": 2, "model/judge/judge/calls": 3, "model/watcher/monitor/calls": 1}
