"""An endpoint slower than its timeout: the log says who waits and what to set; nothing is repeated in vain."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.models.misbehaving_server import MODEL, MisbehavingServer
from tests.patience import patience
from upshot.core.conversation import Message
from upshot.models.base import ModelCallError, Request
from upshot.models.client.guarded import GuardedModel
from upshot.models.client.usage import UsageMeter, describe_waits, watch
from upshot.models.connect import connect

FOREVER = 60.0
"""Seconds that the slow server takes to answer; nobody waits for them."""


def ask(text: str = "?", role: str = "judge") -> Request:
    return Request([Message("user", text)], role=role)


async def judge_of(server: MisbehavingServer, **settings: object) -> GuardedModel:
    spec = {"url": server.url, "model": MODEL, "timeout_s": 0.3, "retries": 6, "backoff_s": 0.001, **settings}
    model = connect(spec, role="judge")
    assert isinstance(model, GuardedModel)
    await model.start()
    return model


def test_a_timeout_that_no_answer_has_ever_met_is_repeated_once_and_the_failure_says_what_to_set() -> None:
    async def go() -> tuple[str, Counter[str]]:
        async with MisbehavingServer(stall=1.0, latency=FOREVER) as server:
            model = await judge_of(server)
            with pytest.raises(ModelCallError) as failed:
                await model.generate(ask())
            await model.aclose()
            return str(failed.value), model.meter.troubles()

    message, troubles = asyncio.run(go())
    assert "after 2 attempts: no answer within 0.3 s, as with every call so far" in message
    assert "raise models.judge.timeout_s (0.3 s), or lower models.judge.concurrency (64)" in message
    assert troubles == {"timeout": 2}, "one repeated, one failed"


def test_after_an_answer_in_time_a_timeout_gets_all_retries() -> None:
    asked: Counter[str] = Counter()

    async def reply(body: dict[str, object]) -> str:
        text = str(body["messages"][-1]["content"])  # type: ignore[index]
        asked[text] += 1
        if text == "slow" and asked[text] <= 4:
            await asyncio.sleep(FOREVER)
        return "yes"

    async def go() -> str:
        async with MisbehavingServer(reply) as server:
            model = await judge_of(server, timeout_s=60.0)
            await model.generate(ask("quick"))
            model._client.timeout_s = patience(0.2)  # type: ignore[attr-defined]
            (answer,) = await model.generate(ask("slow"))
            await model.aclose()
            return answer.text

    assert asyncio.run(go()) == "yes" and asked["slow"] == 5


def test_while_it_is_slow_the_role_the_model_and_the_setting_are_named(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> str:
        async with MisbehavingServer(stall=1.0, latency=FOREVER) as server:
            model = await judge_of(server, timeout_s=5.0)
            watching = asyncio.create_task(watch(lambda: [model.meter], every_s=0.05))
            call = asyncio.create_task(model.generate(ask(role="judge")))
            while "waiting for" not in caplog.text:
                await asyncio.sleep(0.02)
            for task in (call, watching):
                task.cancel()
            await asyncio.gather(call, watching, return_exceptions=True)
            await model.aclose()
            return model.name

    name = asyncio.run(go())
    assert f"waiting for the judge ({name}): 1 calls in progress" in caplog.text


def test_a_resumed_run_does_not_report_what_failed_in_the_process_before() -> None:
    dead = UsageMeter("judge")
    dead.role("judge").retries["timeout"] = 40
    alive = UsageMeter("judge", 120.0, "raise models.judge.timeout_s")
    before = {alive.name: alive.troubles()}
    alive.restore(dead.state())
    assert alive.stats()["judge/retries/timeout"] == 40, "the run's totals go on"
    assert describe_waits([alive], before) == ""
    alive.role("judge").retries["timeout"] += 1
    assert describe_waits([alive], before) == (
        "judge: 0 calls in progress, retried or failed: timeout 1; raise models.judge.timeout_s"
    )
