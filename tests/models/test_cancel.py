"""Ctrl-C, cancellation and closing leave no call running."""

import asyncio
import signal
import subprocess
import sys

import pytest

from tests.models.misbehaving_server import MisbehavingServer
from tests.patience import until
from upshot.core.conversation import Message
from upshot.models.base import ModelCallError, Request
from upshot.models.connect import connect

ASK = Request([Message("user", "hello")])


async def settled(server, outcome, count):
    """Wait until the server has noticed that the clients left."""
    await until(lambda: server.outcomes[outcome] >= count)


def test_a_cancelled_call_is_aborted_at_the_server():
    async def run():
        async with (
            MisbehavingServer(latency=900) as server,
            connect({"url": server.url, "concurrency": 8}) as model,
        ):
            calls = asyncio.gather(*(model.generate(ASK) for _ in range(20)))
            while server.in_flight < 8:
                await asyncio.sleep(0.01)
            calls.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calls
            await settled(server, "aborted", 8)
            assert server.outcomes == {"aborted": 8}
            assert server.in_flight == 0
            assert model.stats()["failed/cancelled"] == 8
            server.latency = 0
            await model.generate(ASK)  # the slots are free again

    asyncio.run(run())


@pytest.mark.parametrize("fault", [{"latency": 900}, {"limit_rate": 1.0, "retry_after": "900"}, {"error": 1.0}])
def test_closing_ends_calls_that_wait_for_an_answer_or_a_retry(fault):
    async def run():
        async with MisbehavingServer(**fault) as server:
            model = connect({"url": server.url, "concurrency": 4, "backoff_s": 900, "patience_s": 9000})
            await model.start()
            calls = [asyncio.create_task(model.generate(ASK)) for _ in range(10)]
            while len(server.records) < 4:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            await model.aclose()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [getattr(r, "reason", r) for r in results] == ["closed"] * 10
            assert all(isinstance(r, ModelCallError) for r in results)
            assert len(server.records) == 4
            assert not [t for t in asyncio.all_tasks() if t in calls]

    asyncio.run(run())


CLIENT = """
import asyncio, sys
from upshot.core.conversation import Message
from upshot.models.base import Request
from upshot.models.connect import connect

async def main():
    async with connect({"url": sys.argv[1], "concurrency": 16}) as model:
        print("ready", flush=True)
        try:
            await asyncio.gather(*(model.generate(Request([Message("user", "x")])) for _ in range(100)))
        finally:
            print("tasks", len(asyncio.all_tasks()) - 1, flush=True)

asyncio.run(main())
"""


def test_ctrl_c_leaves_no_orphan_call():
    async def run():
        async with MisbehavingServer(latency=900) as server:
            client = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", CLIENT, server.url],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            try:
                await until(lambda: server.in_flight == 16)
                client.send_signal(signal.SIGINT)
                _, errors = await asyncio.to_thread(client.communicate)
            finally:
                client.kill()
            await settled(server, "aborted", 16)
            assert server.outcomes == {"aborted": 16}, "every call was broken off, and no queued one was sent"
            assert "KeyboardInterrupt" in errors
            assert "Unclosed" not in errors
            assert "never retrieved" not in errors

    asyncio.run(run())
