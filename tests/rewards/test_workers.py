"""Reward managers: the same verdicts in all of them; in the pool, a hang, crash or huge memory use costs only its own
item."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest
import uvicorn
from aiohttp import ClientSession
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.patience import patience
from upshot.core.errors import UserError
from upshot.core.http_listener import http_protocol, listen
from upshot.core.http_server import CalmEnd
from upshot.core.score import Score
from upshot.models.client.budget import Budget
from upshot.rewards.workers.base import Manager, managers
from upshot.rewards.workers.pool import InlineManager, PoolManager
from upshot.rewards.workers.remote import RemoteManager
from upshot.rewards.workers.scorer import scorer_app
from upshot.rollout.dependencies import Dependencies
from upshot.rollout.services import Services
from upshot.tasks.verifiers.base import Claim
from upshot.tasks.verifiers.workers import ForkServer

sys.path.insert(
    0, str(Path(__file__).parents[1] / "tasks" / "verifiers")
)  # workers import the hostile verifiers by name

CLAIMS = [
    Claim("gsm8k", "#### 42", "42"),
    Claim("gsm8k", "#### 41", "42"),
    Claim("openai/gsm8k", "it is 42", "42", options={"mode": "flexible"}),
    Claim("gsm8k", "#### 42", "forty-two"),
    Claim("math", "\\boxed{\\frac{x+1}{2}}", "0.5x+0.5"),
    Claim("math", "\\boxed{3-1}", "2"),
    Claim("math", "no answer", ""),
    Claim("constraints", "no commas here", {"instruction_id": ["punctuation:no_comma"], "kwargs": [{}]}),
    Claim("constraints", "x", {"instruction_id": ["no:such"], "kwargs": [{}]}),
    Claim("constraints", "x", {"instruction_id": ["keywords:frequency"], "kwargs": [{"keyword": "x"}]}),
    Claim("multiple-choice", "The answer is (B).", 1, {"choices": ["a", "b"]}),
    Claim("exact-match", "<answer>The Moon</answer>", ["moon"]),
    Claim("bold-formatting", "a **b** c", None),
]


@asynccontextmanager
async def scorer(app: Any) -> AsyncIterator[str]:
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(app, log_level="error", http=http_protocol(100), timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def verify_all(manager: Manager, claims: list[Claim]) -> list[Score]:
    try:
        return list(await asyncio.gather(*(manager.verify(claim) for claim in claims)))
    finally:
        await manager.aclose()


def test_inline_pool_and_remote_managers_agree_on_every_claim() -> None:
    async def run() -> list[list[dict[str, Any]]]:
        inline = await verify_all(InlineManager(), CLAIMS)
        pool = await verify_all(PoolManager(workers=2), CLAIMS)
        async with scorer(scorer_app(InlineManager())) as url:
            remote = await verify_all(RemoteManager(url), CLAIMS)
        return [[score.to_dict() for score in scores] for scores in (inline, pool, remote)]

    inline, pool, remote = asyncio.run(run())
    assert [score.get("value") for score in inline] == [1, 0, 1, None, 1, 0, None, 1, None, None, 1, 1, 1]
    assert inline[9]["missing"] == "error" and inline[9]["detail"]["why"].startswith("verifier: TypeError")
    assert pool == inline
    assert remote == inline


def test_extra_and_options_may_be_any_mapping() -> None:
    extra, options = MappingProxyType({"question": "?"}), MappingProxyType({"mode": "flexible"})
    claim = Claim("gsm8k", "it is 42", "42", extra, options)
    assert asyncio.run(verify_all(PoolManager(workers=1), [claim]))[0].value == 1


def test_only_the_item_that_exceeds_the_memory_limit_is_stopped() -> None:
    claims = [Claim("hostile:Hostile", text, "a") for text in ("memory", "a", "memory", "a")]
    scores = asyncio.run(verify_all(PoolManager(workers=2, seconds=30, memory_mb=400), claims))
    assert [score.reason for score in scores] == ["crashed", None, "crashed", None]


def test_a_loop_or_crash_costs_only_its_own_item_within_its_limit() -> None:
    seconds = patience(2.0)

    async def run() -> tuple[dict[str, Score], dict[str, float]]:
        manager = PoolManager(workers=2, seconds=seconds)
        took: dict[str, float] = {}
        scores: dict[str, Score] = {}
        await manager.verify(Claim("hostile:Hostile", "a", "a"))  # warm up

        async def one(key: str, response: str) -> None:
            started = time.perf_counter()
            scores[key] = await manager.verify(Claim("hostile:Hostile", response, "a"))
            took[key] = time.perf_counter() - started

        try:
            for response in ("loop", "segfault", "raise", "recurse", "exit"):
                neighbours = [one(f"{response}-beside-{n}", "a") for n in range(5)]
                await asyncio.gather(one(response, response), *neighbours)
        finally:
            await manager.aclose()
        return scores, took

    scores, took = asyncio.run(run())
    reasons = {
        key: (score.reason, score.why.partition(":")[2].partition(":")[0])
        for key, score in scores.items()
        if score.is_missing
    }
    assert reasons == {
        "loop": ("timeout", f" took more than {seconds:g} s"),
        "segfault": ("crashed", " crashed (SIGSEGV)"),
        "raise": ("error", " RuntimeError"),
        "recurse": ("error", " RecursionError"),
        "exit": ("crashed", " crashed (exit 3)"),
    }
    assert all(score.value == 1 for key, score in scores.items() if "beside" in key)
    assert max(took.values()) < seconds + patience(3.0)


def test_a_cancelled_item_leaves_no_stale_answer_behind() -> None:
    async def run() -> Score:
        manager = PoolManager(workers=1, seconds=30)
        await manager.verify(Claim("hostile:Hostile", "a", "a"))
        task = asyncio.create_task(manager.verify(Claim("hostile:Hostile", "spin 1.5", "a")))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        score = await manager.verify(Claim("hostile:Hostile", "a", "a"))
        await manager.aclose()
        return score

    assert asyncio.run(run()).value == 1


def test_a_claim_cancelled_while_its_worker_starts_leaves_no_stale_answer_behind() -> None:
    async def run() -> list[Score]:
        manager, claim = PoolManager(workers=1, seconds=30), Claim("hostile:Hostile", "a", "a")
        for _ in range(3):
            task = asyncio.create_task(manager.verify(claim))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return await verify_all(manager, [claim] * 2)

    assert [score.value for score in asyncio.run(run())] == [1, 1]


def test_a_fork_server_reads_options_of_any_length() -> None:
    server = ForkServer()
    try:
        with pytest.raises(UserError, match=r"verifier 'gsm8k' cannot start in a worker process: .*mode"):
            server.warm("gsm8k", json.dumps({"mode": "x" * 300_000}))
        server.warm("gsm8k", "{}")
    finally:
        server.close()


def test_workers_are_recycled_and_none_is_left_behind() -> None:
    async def run() -> tuple[dict[str, float], list[int]]:
        manager = PoolManager(workers=1, recycle=5)
        scores = [await manager.verify(Claim("gsm8k", "#### 1", "1")) for _ in range(12)]
        assert all(score.value == 1 for score in scores)
        stats = manager.stats()
        await manager.aclose()
        return stats, _children()

    before = _children()
    stats, after = asyncio.run(run())
    assert stats["verifier_forks"] == 3
    assert set(after) <= set(before)


def test_a_script_without_a_main_guard_is_not_run_again_by_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "score.py"
    script.write_text(
        "import asyncio, threading\n"
        "from upshot.rewards.workers.pool import PoolManager\n"
        "from upshot.tasks.verifiers.base import Claim\n"
        "print('begun', flush=True)\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "async def main():\n"
        "    manager = PoolManager(workers=2)\n"
        "    print((await manager.verify(Claim('gsm8k', '#### 1', '1'))).value)\n"
        "    await manager.aclose()\n"
        "asyncio.run(main())\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["begun", "1.0"]


def test_a_killed_worker_is_replaced_and_so_is_a_killed_fork_server() -> None:
    async def run() -> list[Score]:
        manager = PoolManager(workers=1)
        claim = Claim("hostile:Hostile", "a", "a")
        scores = [await manager.verify(claim)]
        assert manager._workers is not None and manager._workers._server is not None
        os.kill(manager._workers._idle[0].pid, signal.SIGKILL)
        scores += [await manager.verify(claim), await manager.verify(claim)]
        manager._workers._server._process.kill()
        manager._workers._server._process.wait()
        scores += [await manager.verify(claim), await manager.verify(claim)]
        await manager.aclose()
        return scores

    scores = asyncio.run(run())
    # The item given to the dead worker is lost: it may have been the one that killed it.
    assert [score.value for score in scores] == [1, None, 1, None, 1]
    assert scores[1].why == "verifier: crashed (SIGKILL)"


def _children() -> list[int]:
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def test_remote_retries_transient_failures_and_gives_up_on_one_item_only() -> None:
    calls: dict[str, int] = {}

    async def verify(request: Request) -> Response:
        response = (await request.json())["response"]
        calls[response] = calls.get(response, 0) + 1
        if response == "down" or (response == "flaky" and calls[response] < 3):
            return Response(status_code=503)
        if response == "slow":
            await asyncio.sleep(60)
        if response == "garbage":
            return Response("no json", media_type="application/json")
        return JSONResponse({"value": 1.0})

    async def run() -> list[Score]:
        async with scorer(CalmEnd(Starlette(routes=[Route("/verify", verify, methods=["POST"])]))) as url:
            manager = RemoteManager(url, seconds=patience(0.5), retries=2, backoff=0.01)
            texts = ("fine", "flaky", "down", "slow", "garbage")
            return await verify_all(manager, [Claim("gsm8k", text, "1") for text in texts])

    fine, flaky, down, slow, garbage = asyncio.run(run())
    assert fine.value == 1
    assert flaky.value == 1
    assert (down.reason, slow.reason, garbage.reason) == ("unavailable", "timeout", "bad_response")
    assert down.why == "remote: http_503"
    assert calls["down"] == 3


def test_an_unreachable_scorer_is_missing_with_the_reason() -> None:
    manager = RemoteManager("http://127.0.0.1:9", retries=1, backoff=0.01)
    assert asyncio.run(verify_all(manager, [Claim("gsm8k", "x", "1")]))[0].reason == "connection"


def test_an_unknown_source_is_a_user_error_in_every_manager() -> None:
    async def run() -> None:
        for manager in (InlineManager(), PoolManager(workers=1)):
            with pytest.raises(UserError, match="did you mean 'gsm8k'"):
                await manager.verify(Claim("gsm8kk", "x", "1"))
            await manager.aclose()
        async with scorer(scorer_app(InlineManager())) as url:
            remote = RemoteManager(url)
            with pytest.raises(UserError, match="did you mean 'gsm8k'"):
                await remote.verify(Claim("gsm8kk", "x", "1"))
            with pytest.raises(UserError, match="registered names only"):
                await remote.verify(Claim("os:system", "x", "1"))
            await remote.aclose()

    asyncio.run(run())


def test_a_scorer_with_a_key_answers_only_requests_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with scorer(scorer_app(InlineManager(), "sesame")) as url:
            remote = RemoteManager(url)
            with pytest.raises(UserError, match="set UPSHOT_SCORER_KEY"):
                await remote.verify(CLAIMS[0])
            await remote.aclose()
            monkeypatch.setenv("UPSHOT_SCORER_KEY", "sesame")
            assert (await verify_all(RemoteManager(url), CLAIMS[:1]))[0].value == 1.0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"\xff", 400),
        (b"9" * 5000, 400),
        (b"[]", 400),
        (b'{"source": "judged", "response": "x", "options": {"rubric": "rate it", "judge": "provider/model"}}', 422),
        (b'{"source": "code", "response": "x", "options": {"sandbox": "subprocess"}}', 422),
    ],
)
def test_a_scorer_refuses_invalid_claims_and_those_that_name_a_judge_or_sandbox(body: bytes, status: int) -> None:
    async def ask() -> int:
        async with scorer(scorer_app(InlineManager())) as url, ClientSession() as client:
            headers = {"Content-Type": "application/json"}
            async with client.post(f"{url}/verify", data=body, headers=headers) as answer:
                return answer.status

    assert asyncio.run(ask()) == status


CLAIM = json.dumps({"source": "gsm8k", "response": "#### 1", "reference": "1"})


def test_a_scorer_reads_json_regardless_of_the_declared_charset() -> None:
    async def ask() -> Any:
        async with scorer(scorer_app(InlineManager())) as url, ClientSession() as client:
            headers = {"Content-Type": "application/json; charset=nonsense"}
            async with client.post(f"{url}/verify", data=CLAIM, headers=headers) as answer:
                return await answer.json()

    assert asyncio.run(ask())["value"] == 1.0


async def connection(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))


HEAD = "POST /verify HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD += f"Content-Length: {len(CLAIM)}\r\n\r\n"


def test_a_scorer_gives_up_on_bodies_that_never_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upshot.rewards.workers.scorer.READ_S", 0.2)

    async def run() -> list[bytes]:
        async with scorer(scorer_app(InlineManager())) as url:
            half = [await connection(url) for _ in range(30)]
            for _, writer in half:
                writer.write(f"{HEAD}{CLAIM[:9]}".encode())
            answers = [await reader.read() for reader, _ in half]  # the server ends each of them
            for _, writer in half:
                writer.close()
            return answers

    assert {answer.split(b"\r\n")[0] for answer in asyncio.run(run())} == {b"HTTP/1.1 408 Request Timeout"}


def test_a_client_that_hangs_up_costs_only_its_own_verdict_and_no_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    begun, broken_off = asyncio.Event(), asyncio.Event()

    class Hanging(InlineManager):
        async def verify(self, claim: Claim) -> Score:
            begun.set()
            try:
                await asyncio.sleep(600)
            finally:
                broken_off.set()
            raise AssertionError

    async def run() -> None:
        async with scorer(scorer_app(Hanging())) as url:
            for sent in (f"{HEAD}{CLAIM}", f"{HEAD}{CLAIM[:9]}"):  # the second is sent with half a body
                _, writer = await connection(url)
                writer.write(sent.encode())
                await writer.drain()
                await begun.wait()
                writer.close()
                await broken_off.wait()

    asyncio.run(run())
    assert not caplog.records and "Traceback" not in capfd.readouterr().err


def test_a_scorer_without_a_key_answers_only_this_machine() -> None:
    async def run() -> None:
        claim = json.dumps({"source": "gsm8k", "response": "#### 1", "reference": "1"})
        async with scorer(scorer_app(InlineManager())) as url, ClientSession() as client:
            for headers, status in (
                ({"Content-Type": "text/plain"}, 415),
                ({"Content-Type": "application/json", "Host": "evil.example"}, 403),
                ({"Content-Type": "application/json"}, 200),
            ):
                async with client.post(f"{url}/verify", data=claim, headers=headers) as answer:
                    assert answer.status == status
            async with client.post(f"{url}/verify", json={**json.loads(claim), "options": [1]}) as answer:
                assert answer.status == 400

    asyncio.run(run())


def test_managers_are_chosen_by_name_and_their_options_checked() -> None:
    assert isinstance(managers.create("pool", {"workers": 1}), PoolManager)
    with pytest.raises(UserError, match="unknown option 'worker'"):
        managers.create("pool", {"worker": 1})
    with pytest.raises(UserError, match="needs the option 'url'"):
        managers.create("remote")


def test_counters_are_logged_with_the_step_and_continue_after_a_resume() -> None:
    def services() -> Services:
        return Services(cast(Any, None), {}, None, {}, {}, Budget(), Dependencies(manager=PoolManager(workers=1)))

    async def count(saved: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
        made = services()
        made.restore(saved)
        await made.manager.verify(CLAIMS[0])
        logged, state = made.stats(), json.loads(json.dumps(made.counters()))
        await made.manager.aclose()
        assert made.stats() == logged, "closing forgets nothing"
        return logged, state

    assert services().stats() == {}
    first, saved = asyncio.run(count({}))
    assert first["manager/verifier_items"] == 1 and first["manager/verifier_timeouts"] == 0
    assert first["time/manager/verifier_forks"] == 1
    assert asyncio.run(count(saved))[0]["manager/verifier_items"] == 2


def test_a_remote_manager_continues_its_counters() -> None:
    manager = RemoteManager("http://127.0.0.1:1")
    manager.restore({"items": 3, "retries": 1, "failures": 1})
    assert manager.stats() == {"verifier_items": 3.0, "verifier_retries": 1.0, "verifier_failures": 1.0}
    assert manager.state() == {"items": 3, "retries": 1, "failures": 1}
