"""User code that never returns: its score is missing with the reason, and the run continues."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.patience import patience
from upshot.config.model_spec import ModelSpec
from upshot.core import time_limit
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.score import Score
from upshot.core.time_limit import CallTimeout, TimeUp, alarm, call_seconds, limit_call, limit_call_now, pause_clock
from upshot.models.base import Completion, Request
from upshot.models.client.guarded import GuardedModel
from upshot.models.openai_format import ApiAnswer
from upshot.rewards.metric import Metric, score_conversation
from upshot.rewards.workers.pool import InlineManager
from upshot.rollout.episode import play_episode
from upshot.tasks.participants.base import Observation, Participant
from upshot.tasks.verifiers.base import Claim, Verifier

LIMIT_S = patience(0.2)
TALK = Conversation(Row("r", (Message("user", "hello"), Message("assistant", "please?"))))


class By(Metric):
    """A metric made from a coroutine function."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    async def score(self, conversation: Conversation) -> Score:
        return Score(float(await self.work() or 1.0))


def scored(metric: Metric, seconds: float = LIMIT_S) -> Score:
    async def play() -> Score:
        call_seconds.set(seconds)
        return (await score_conversation({"mine": metric}, TALK))["mine"]

    return asyncio.run(play())


async def forever() -> float:
    await asyncio.sleep(3600)
    return 1.0


async def sleeps_without_waiting() -> float:
    time.sleep(3600)
    return 1.0


async def computes() -> float:
    while True:
        with contextlib.suppress(Exception):
            sum(range(1000))


async def computes_after_a_wait() -> float:
    await asyncio.sleep(0.01)
    return await computes()


@pytest.mark.parametrize("work", [forever, sleeps_without_waiting, computes, computes_after_a_wait])
def test_a_metric_that_never_returns_is_missing_as_timeout(work: Callable[[], Any]) -> None:
    score = scored(By(work))
    assert score.reason == "timeout" and score.why == f"mine: By took more than {LIMIT_S:g} s (call_seconds)"


def test_siblings_keep_their_scores() -> None:
    async def play() -> dict[str, Score]:
        call_seconds.set(LIMIT_S)
        return await score_conversation({"bad": By(forever), "good": By(lambda: asyncio.sleep(0.01))}, TALK)

    scores = asyncio.run(play())
    assert scores["bad"].reason == "timeout"
    assert scores["good"].value == 1.0


def test_a_timeout_raised_by_user_code_is_not_mistaken_for_the_limit() -> None:
    async def gives_up() -> float:
        async with asyncio.timeout(0.01):
            return await forever()

    assert scored(By(gives_up), 3600).why.startswith("mine: TimeoutError (test_time_limit.py, line ")


def test_results_and_exceptions_of_user_code_pass_through() -> None:
    async def breaks() -> float:
        await asyncio.sleep(0)
        raise KeyError("x")

    assert scored(By(breaks)).reason == "error"
    assert scored(By(breaks)).why.startswith("mine: KeyError: 'x' (test_time_limit.py, line ")
    assert scored(By(lambda: asyncio.sleep(0, 0.5))).value == 0.5


def test_user_code_that_calls_exit_ends_only_its_own_call() -> None:
    class Plain(By):
        def score(self, conversation: Conversation) -> Score:  # type: ignore[override]
            sys.exit(3)

    async def leaves() -> float:
        await asyncio.sleep(0)
        sys.exit(3)

    for metric in (By(leaves), Plain(leaves)):
        score = scored(metric)
        assert score.reason == "error"
        assert score.why.startswith("mine: RuntimeError: sys.exit(3) was called (test_time_limit.py, line ")


def test_a_plain_function_works_and_has_the_limit_too() -> None:
    class Plain(By):
        def score(self, conversation: Conversation) -> Score:  # type: ignore[override]
            return Score(self.work())

    assert scored(Plain(lambda: 0.25)).value == 0.25
    assert scored(Plain(lambda: time.sleep(3600))).reason == "timeout"


def test_an_environment_that_never_answers_costs_only_its_own_episode() -> None:
    class Silent(Participant):
        async def observe(self, conversation: Conversation) -> Observation:
            await forever()
            raise AssertionError

    class Says:
        async def reply(self, conversation: Conversation, role: str = "") -> bool:
            return True

    async def play() -> None:
        call_seconds.set(0.1)
        await play_episode(TALK.fork("x"), Says(), Silent(), max_turns=2)  # type: ignore[arg-type]

    with pytest.raises(CallTimeout, match=r"Silent took more than 0.1 s \(call_seconds\)"):
        asyncio.run(play())


def test_a_users_own_verifier_has_the_limit() -> None:
    class Loops(Verifier):
        def score(self, response: str, reference: Any, extra: Any) -> Score:
            while True:
                pass

    async def verify() -> Score:
        call_seconds.set(0.1)
        manager = InlineManager()
        manager.verifier = lambda claim: Loops()  # type: ignore[method-assign]
        return await manager.verify(Claim("x", "a", "b"))

    assert asyncio.run(verify()).reason == "timeout"


class Slow(GuardedModel):
    """A helper model that takes some time."""

    async def _attempt(self, request: Request, n: int, seed: int | None) -> ApiAnswer:
        await asyncio.sleep(2 * LIMIT_S)
        return ApiAnswer([Completion("ok", "stop")] * n, 1, 1)


def test_waiting_for_a_helper_model_is_not_counted() -> None:
    model = Slow(ModelSpec.model_validate("scripted:x"))

    async def asks() -> float:
        await asyncio.gather(*(model.generate(Request((Message("user", "?"),))) for _ in range(3)))
        return 0.75

    async def asks_and_hangs() -> float:
        await asks()
        return await forever()

    assert scored(By(asks)).value == 0.75
    assert scored(By(asks_and_hangs)).reason == "timeout"


def test_time_while_the_whole_program_was_suspended_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "LATE_S", 0.1)

    async def play() -> float:
        call_seconds.set(0.3)
        asyncio.get_running_loop().call_later(0.05, time.sleep, 0.6)  # a breakpoint of other code
        work = By(lambda: asyncio.sleep(0.2))
        return (await score_conversation({"m": work}, TALK))["m"].value or 0.0

    assert asyncio.run(play()) == 1.0


def test_a_person_at_a_breakpoint_may_take_as_long_as_they_like() -> None:
    def stops() -> float:
        before = sys.gettrace()
        sys.settrace(lambda *_: None)  # like pdb
        try:
            time.sleep(0.3)
        finally:
            sys.settrace(before)
        return 1.0

    async def call() -> float:
        call_seconds.set(0.1)
        return limit_call_now(object_of_the_user(), stops)

    assert asyncio.run(call()) == 1.0


def object_of_the_user() -> object:
    return type("Mine", (), {"__module__": "my_pkg"})()


def test_an_alarm_set_by_other_code_still_fires() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    saved = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        limit_call_now(object_of_the_user(), time.sleep, 0.05)
        time.sleep(0.4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *saved)
        signal.signal(signal.SIGALRM, before)
    assert rung == [1]


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("work", [forever, computes, computes_after_a_wait])
def test_the_limit_holds_outside_the_main_thread(work: Callable[[], Any]) -> None:
    assert in_a_thread(lambda: scored(By(work))).reason == "timeout"


def test_outside_the_main_thread_no_alarm_fires_after_its_call() -> None:
    """Calls that end just when their time is up: some are late, and none is interrupted afterwards."""

    def race() -> int:
        late = 0
        for _ in range(200):
            until = time.monotonic() + 0.002
            try:
                with alarm(0.002):
                    while time.monotonic() < until:
                        pass
            except TimeUp:
                late += 1
            sum(range(2000))  # a late alarm would fire here and end the thread
        return late

    assert 0 <= in_a_thread(race) <= 200


def test_outside_the_main_thread_an_outer_alarm_still_fires() -> None:
    def nested() -> str:
        try:
            with alarm(0.2):
                with alarm(60.0):
                    sum(range(1000))
                while True:
                    pass
        except TimeUp:
            return "rang"

    assert in_a_thread(nested) == "rang"


def test_outside_the_main_thread_code_that_cannot_be_interrupted_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upshot.core.time_limit.AGAIN_S", 0.05)

    def sleeps() -> float:
        time.sleep(0.4)
        return 1.0

    def call() -> str:
        try:
            limit_call_now(object_of_the_user(), sleeps)
        except CallTimeout:
            return "late"
        return "in time"

    def briefly() -> str:
        call_seconds.set(0.1)
        return call()

    assert in_a_thread(briefly) == "late"
    assert "exceeds its time limit and cannot be interrupted" in caplog.text


def test_cancelling_the_caller_is_not_a_timeout() -> None:
    async def play() -> None:
        task = asyncio.create_task(limit_call(object_of_the_user(), forever))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(play())


def test_built_in_code_has_no_time_limit() -> None:
    @pause_clock
    async def work() -> bool:
        return time_limit._clock.get() is None

    async def play() -> bool:
        return await limit_call(InlineManager(), work)

    assert asyncio.run(play())


def test_after_an_alarm_in_a_thread_a_debugger_still_steps() -> None:
    """In a separate process: on failure, the traced call never returns."""
    program = """
import sys, threading, time
from upshot.core.time_limit import TimeUp, alarm

def late():
    try:
        with alarm(0.05):
            while True:
                pass
    except TimeUp:
        pass

thread = threading.Thread(target=late)
thread.start()
thread.join()
sys.settrace(lambda *_: None)
(lambda: None)()
sys.settrace(None)
print("stepped")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "stepped\n"
