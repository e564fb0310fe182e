# ruff: noqa: E501 (the programs are one line each)
"""Python sessions: state is kept from turn to turn, under the same walls and limits, and dropped when idle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patience import patience, until
from tests.sandbox.conftest import QUICK, soon
from upshot.sandbox import Busy, Limits, Outcome, Sandbox


def test_state_is_kept_between_turns_and_not_between_sessions(box: Any) -> None:
    async def scenario() -> None:
        async with await box.sandbox.session() as one, await box.sandbox.session() as two:
            assert (await one.turn("x = 3\nprint('hello')\nx + 1")).stdout == "hello\n4\n"
            assert (await one.turn("def f(y):\n    return x * y")).stdout == ""
            assert (await one.turn("f(5)")).stdout == "15\n"
            failed = await two.turn("x")
            assert failed.outcome is Outcome.ERROR and "NameError" in failed.stderr

    box(scenario())


def test_an_error_leaves_the_session_alive(box: Any) -> None:
    async def scenario() -> None:
        async with await box.sandbox.session() as session:
            await session.turn("x = 1")
            result = await session.turn("1 / 0")
            assert result.outcome is Outcome.ERROR and "ZeroDivisionError" in result.stderr
            assert (await session.turn("x")).stdout == "1\n"

    box(scenario())


def test_a_turn_out_of_time_is_interrupted_and_state_kept(box: Any) -> None:
    async def scenario() -> None:
        async with await box.sandbox.session() as session:
            await session.turn("x = 1")
            result = await session.turn("while True: pass", cpu_seconds=0.2)
            assert result.outcome is Outcome.TIMEOUT and "kept" in result.detail
            assert (await session.turn("x")).stdout == "1\n"

    box(scenario())


def test_a_turn_that_will_not_stop_ends_the_session(box: Any) -> None:
    async def scenario() -> None:
        async with await box.sandbox.session() as session:
            stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
            result = await session.turn(stubborn, cpu_seconds=0.2)
            assert result.outcome is Outcome.TIMEOUT and "ended" in result.detail
            assert "ended" in (await session.turn("1")).detail

    box(scenario())
    assert soon(lambda: box.strangers() == [])


def test_a_process_that_dies_between_turns_ends_the_session_with_a_clear_message(box: Any) -> None:
    async def scenario() -> None:
        session = await box.sandbox.session()
        await session.turn("import threading, os; threading.Timer(0.05, os._exit, [0]).start()")
        await asyncio.sleep(patience(0.4))
        results = [await session.turn("1 + 1") for _ in range(2)]
        assert [result.outcome for result in results] == [Outcome.ERROR] * 2
        assert "ended between turns" in results[0].detail and "has ended" in results[1].detail
        assert not session.busy

    box(scenario())


def test_a_cancelled_turn_is_interrupted_and_the_next_gets_its_own_output(box: Any) -> None:
    async def scenario() -> None:
        async with await box.sandbox.session() as session:
            await session.turn("x = 1")
            turn = asyncio.create_task(session.turn("import time\ntime.sleep(2)\nprint('first')"))
            await asyncio.sleep(0.2)
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)
            assert turn.cancelled()
            assert (await session.turn("print('second', x)")).stdout == "second 1\n"
            assert (await session.turn("print('third')")).stdout == "third\n"

    box(scenario())


def test_simultaneous_turns_run_one_after_the_other(box: Any) -> None:
    async def scenario() -> None:
        async with await box.sandbox.session() as session:
            await session.turn("x = 0")
            turns = [session.turn(f"import time\ntime.sleep(0.05)\nx += 1\nprint({number}, x)") for number in range(3)]
            assert [result.stdout for result in await asyncio.gather(*turns)] == ["0 1\n", "1 2\n", "2 3\n"]

    box(scenario())


def test_closing_a_session_ends_its_turn_with_a_clear_message(box: Any) -> None:
    async def scenario() -> None:
        session = await box.sandbox.session()
        turns = [asyncio.create_task(session.turn("import time; time.sleep(9)")) for _ in range(2)]
        await asyncio.sleep(0.2)
        await session.aclose()
        results = await asyncio.gather(*turns)
        assert all(result.outcome is Outcome.ERROR and "closed" in result.detail for result in results), results

    box(scenario())


def test_a_turn_that_does_not_read_its_code_times_out(box: Any) -> None:
    reply = "import os, json\nos.write(5, json.dumps({'error': None}).encode() + b'\\n')\nwhile True: pass"

    async def scenario() -> None:
        session = await box.sandbox.session()
        assert (await session.turn(reply)).outcome is Outcome.PASSED
        result = await session.turn("#" * (8 << 20), cpu_seconds=0.3)
        assert result.outcome is not Outcome.SANDBOX_FAULT
        await session.aclose()

    box(scenario())


def test_the_cpu_time_of_a_turn_counts_every_process(box: Any) -> None:
    if box.sandbox.layers.namespaces is None:
        pytest.skip("only a PID namespace lets a program start processes")
    code = "import os\nif os.fork() == 0:\n    while True: pass\nos.wait()"

    async def scenario() -> None:
        async with await box.sandbox.session() as session:
            result = await session.turn(code, cpu_seconds=0.2)
            assert result.outcome is Outcome.TIMEOUT and result.wall_seconds < QUICK.wall_seconds, result

    box(scenario())


def test_hostile_turns_are_contained(box: Any) -> None:
    async def scenario(code: str, *allowed: Outcome) -> None:
        async with await box.sandbox.session(
            Limits(cpu_seconds=0.5, wall_seconds=patience(2), memory_mb=128, output_kb=64)
        ) as session:
            result = await session.turn(code)
            assert result.outcome in allowed, (code, result)

    box(scenario("import os\nos._exit(0)", Outcome.ERROR))
    box(scenario("import ctypes\nctypes.CDLL(None).mount(0, 0, 0, 0, 0)", Outcome.KILLED_BY_POLICY))
    box(scenario("x = bytearray(1 << 40)", Outcome.OUT_OF_MEMORY))
    box(scenario("while True: print('x' * 1000)", Outcome.OUTPUT_LIMIT, Outcome.ERROR))
    box(
        scenario(
            "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'\\xff' * 100)\n    except OSError:\n        pass",
            Outcome.ERROR,
        )
    )
    box(scenario("open('/etc/shadow')", Outcome.ERROR))
    assert soon(lambda: box.strangers() == [])


def test_output_of_one_turn_is_not_in_the_next(box: Any) -> None:
    async def scenario() -> None:
        async with await box.sandbox.session() as session:
            await session.turn("print('a' * 1000)")
            assert (await session.turn("print('b')")).stdout == "b\n"

    box(scenario())


def test_an_idle_session_is_evicted() -> None:
    async def scenario() -> None:
        async with Sandbox(slots=1, session_idle_seconds=0.3) as sandbox:
            session = await sandbox.session()
            await session.turn("x = 1")
            await until(lambda: session.over)
            result = await session.turn("x")
            assert result.outcome is Outcome.ERROR and "idle" in result.detail

    asyncio.run(scenario())


def test_a_full_sandbox_says_when_to_retry_and_idle_sessions_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from upshot.sandbox.local import pool

    async def scenario() -> None:
        async with Sandbox(slots=1, max_sessions=2) as sandbox:
            first, second = [await sandbox.session() for _ in range(2)]
            with pytest.raises(Busy):
                await sandbox.session()
            monkeypatch.setattr(pool, "FORGOTTEN_SECONDS", 0.0)
            third = await sandbox.session()
            assert "ended" in (await first.turn("1")).detail
            assert (await second.turn("2")).stdout == "2\n" and (await third.turn("3")).stdout == "3\n"

    asyncio.run(scenario())
