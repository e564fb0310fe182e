"""The verifier metric: the environment's own score first, then the manager's verdict, then the task's."""

from __future__ import annotations

import asyncio

from upshot.chat import Conversation, Message, Row
from upshot.rewards.managers.base import Manager
from upshot.rewards.metrics.format_errors import FormatErrors
from upshot.rewards.metrics.verifier import Verifier
from upshot.score import Score
from upshot.tasks.base import Task, tasks
from upshot.verifiers.base import Claim


class Noting(Manager):
    """Remembers what it was asked."""

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


def test_the_environments_own_score_wins() -> None:
    talk = conversation("#### 41")
    talk.session["score"] = Score(0.75)
    assert asyncio.run(Verifier(task(), Noting()).score(talk)).value == 0.75


def test_the_manager_is_asked_with_the_last_reply_and_the_tasks_options() -> None:
    manager = Noting()
    assert asyncio.run(Verifier(task(), manager).score(conversation("#### 41", "it is 42"))).value == 0.25
    (claim,) = manager.claims
    assert (claim.source, claim.response, claim.reference) == ("gsm8k", "it is 42", "42")
    assert claim.options == {"mode": "flexible"}
    assert claim.extra["question"] == "6*7?"


def test_without_a_manager_the_task_decides() -> None:
    assert asyncio.run(Verifier(task()).score(conversation("it is 42"))).value == 1
    assert asyncio.run(Verifier(task()).score(conversation())).reason == "no reply to verify"


def test_format_errors_are_the_share_of_turns_in_bad_form() -> None:
    metric = FormatErrors(task())
    assert asyncio.run(metric.score(conversation("it is 42", "#### 42"))).value == 0.5
    assert asyncio.run(metric.score(conversation())).is_missing
