"""The verifier metric: the environment's own score first, then the manager's verdict, then the task's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from upshot.core.conversation import Conversation, Message, Row
from upshot.core.score import Score
from upshot.core.time_limit import call_seconds
from upshot.rewards.metric import VerifierMetric, score_by
from upshot.rewards.metrics.format_errors import FormatErrors
from upshot.rewards.workers.base import Manager
from upshot.tasks.base import Task, groups_of, tasks
from upshot.tasks.mix import Mix
from upshot.tasks.verifiers.base import Claim


class Noting(Manager):
    """Records what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.claims: list[Claim] = []

    async def verify(self, claim: Claim) -> Score:
        self.claims.append(claim)
        return Score(0.25)


def conversation(*replies: str) -> Conversation:
    talk = Conversation(Row("r", (Message("user", "6*7?"),), reference="42", source="gsm8k", meta={"question": "6*7?"}))
    for reply in replies:
        talk.say(Message("assistant", reply))
    return talk


def task() -> Task:
    return tasks.create("gsm8k", {"file": "arithmetic", "mode": "flexible"})


def test_the_environments_own_score_takes_precedence() -> None:
    talk = conversation("#### 41")
    talk.score = Score(0.75)
    assert asyncio.run(VerifierMetric(task(), Noting()).score(talk)).value == 0.75


def test_the_manager_is_asked_with_the_last_reply_and_the_tasks_options() -> None:
    manager = Noting()
    assert asyncio.run(VerifierMetric(task(), manager).score(conversation("#### 41", "it is 42"))).value == 0.25
    (claim,) = manager.claims
    assert (claim.source, claim.response, claim.reference) == ("gsm8k", "it is 42", "42")
    assert claim.options == {"mode": "flexible"}
    assert claim.extra["question"] == "6*7?"


def test_without_a_manager_the_task_decides() -> None:
    assert asyncio.run(VerifierMetric(task()).score(conversation("it is 42"))).value == 1
    assert asyncio.run(VerifierMetric(task()).score(conversation())).why == "no reply to verify"


def test_format_errors_are_the_share_of_turns_in_bad_form() -> None:
    metric = FormatErrors(task())
    assert asyncio.run(metric.score(conversation("it is 42", "#### 42"))).value == 0.5
    assert asyncio.run(metric.score(conversation())).is_missing


class Mine(Task):
    """A user's task that does what its row says."""

    name = "mine"

    def rows(self, split: str) -> list[Row]:
        return []

    def _does(self, row: Row) -> object:
        if row.goal == "hang":
            time.sleep(3600)
        if row.goal == "raise":
            raise KeyError("lost")
        return row.goal

    def claim(self, conversation: Conversation) -> Claim | None:
        self._does(conversation.row)
        return None

    def groups(self, row: Row) -> dict[str, str]:
        return self._does(row)  # type: ignore[return-value]

    async def verify(self, conversation: Conversation) -> Score:
        return self._does(conversation.row)  # type: ignore[return-value]


@pytest.fixture
def briefly() -> Iterator[None]:
    before = call_seconds.set(0.1)
    yield
    call_seconds.reset(before)


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("manager", [None, Noting()])
@pytest.mark.parametrize("mixed", [False, True])
def test_verify_and_claim_of_a_users_task_have_the_time_limit(manager: Manager | None, mixed: bool) -> None:
    task = Mix([{"name": f"{__name__}:Mine", "as": "mine"}]) if mixed else Mine()
    metric = VerifierMetric(task, manager)
    talk = Conversation(Row("r", (), goal="hang", meta={"mix_task": "mine"}))
    score = asyncio.run(score_by(metric, talk, "verifier"))
    assert score.reason == "timeout" and "Mine took more than 0.1 s" in score.why


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("goal", ["hang", "raise", None])
def test_groups_of_a_users_task_have_the_limit_and_a_failing_call_gives_none(
    goal: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert groups_of(Mine(), Row("r7", (), goal=goal)) == {}
    assert "task 'mine' cannot name the groups of row 'r7'" in caplog.text
    assert groups_of(Mine(), Row("r", (), goal={"level": 3})) == {"level": "3"}


def test_a_task_or_environment_may_give_a_plain_number() -> None:
    assert asyncio.run(VerifierMetric(Mine()).score(Conversation(Row("r", (), goal=0.5)))).value == 0.5
    talk = conversation("#### 41")
    talk.score = 0.75
    assert asyncio.run(VerifierMetric(task(), Noting()).score(talk)).value == 0.75
