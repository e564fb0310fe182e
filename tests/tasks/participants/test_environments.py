"""Feedback environments: what they say, in which role, and what they count."""

from __future__ import annotations

import asyncio

from upshot.core.conversation import Conversation, Message, Row
from upshot.tasks.gsm8k import Gsm8k
from upshot.tasks.mathematics import Mathematics
from upshot.tasks.participants.base import Observation


def play(task: Gsm8k | Mathematics, *replies: str, truth: str = "42") -> tuple[Conversation, list[Observation]]:
    conversation = Conversation(Row("r", (Message("user", "?"),), reference=truth, source="gsm8k"))
    environment = task.environment()
    seen = []
    for reply in replies:
        conversation.say(Message("assistant", reply))
        observation = asyncio.run(environment.observe(conversation))
        conversation.count(observation.metrics)
        for message in observation.messages:
            conversation.say(message)
        seen.append(observation)
    return conversation, seen


def test_every_fault_is_named_in_a_user_message() -> None:
    task = Gsm8k(file="arithmetic")
    _, seen = play(task, "it is 42", "#### many", "40 + 3 = 42\n#### 42", "40 + 2 = 42\n#### 42")
    assert [o.done for o in seen] == [False, False, False, True]
    assert all(message.role == "user" for o in seen for message in o.messages)
    assert "no answer line" in seen[0].messages[0].content
    assert "not one number" in seen[1].messages[0].content
    assert "40 + 3 = 42" in seen[2].messages[0].content


def test_counts_say_which_faults_there_were_and_whether_feedback_was_used() -> None:
    conversation, _ = play(Gsm8k(file="arithmetic"), "it is 42", "it is 42", "#### 42")
    used = {"feedback": 2, "feedback_used": 1, "format_feedback": 2, "format_feedback_used": 1}
    assert conversation.counts == {"format_errors": 2, **used}


def test_right_or_wrong_is_told_only_when_asked_for() -> None:
    _, silent = play(Gsm8k(file="arithmetic"), "#### 41")
    assert silent[0].done
    _, told = play(Gsm8k(file="arithmetic", tell=True), "#### 41", "#### 42")
    assert [o.done for o in told] == [False, True]
    assert "not right" in told[0].messages[0].content


def test_a_hint_says_what_the_step_comes_to() -> None:
    _, seen = play(Gsm8k(file="arithmetic", hint=True), "40 + 3 = 42\n#### 42")
    assert "The left side is 43" in seen[0].messages[0].content


def test_feedback_kinds_can_be_chosen() -> None:
    _, seen = play(Gsm8k(file="arithmetic", feedback=["arithmetic"]), "it is 42")
    assert seen[0].done


def test_math_asks_for_the_box() -> None:
    _, seen = play(Mathematics(file="x.jsonl"), "it is 42", "\\boxed{42}")
    assert [o.done for o in seen] == [False, True]
    assert "\\boxed{}" in seen[0].messages[0].content


def test_one_environment_serves_conversations_without_mixing_them() -> None:
    environment = Gsm8k(file="arithmetic").environment()

    async def one(number: int) -> dict[str, float]:
        conversation = Conversation(Row(str(number), (Message("user", "?"),), reference="1", source="gsm8k"))
        for turn in range(number % 3):
            conversation.say(Message("assistant", f"no form {turn}"))
            conversation.count((await environment.observe(conversation)).metrics)
        conversation.say(Message("assistant", "#### 1"))
        conversation.count((await environment.observe(conversation)).metrics)
        return conversation.counts

    async def run() -> list[dict[str, float]]:
        return await asyncio.gather(*(one(n) for n in range(300)))

    for number, counts in enumerate(asyncio.run(run())):
        assert counts.get("format_errors", 0) == number % 3
