"""The scripted user, which needs no model."""

from __future__ import annotations

import asyncio

from tests.tasks.participants.speakers import chat
from upshot.core.conversation import Conversation, Message, Row
from upshot.tasks.participants.base import users
from upshot.tasks.users.scripted import ScriptedUser


def play(user: ScriptedUser, conversation: Conversation, answers: list[str]) -> list[str]:
    """The user's messages in reply to the answers; '.' when it leaves."""
    said = []
    for answer in answers:
        conversation.say(Message("assistant", answer))
        seen = asyncio.run(user.observe(conversation))
        said += [m.content for m in seen.messages] + (["."] if seen.done else [])
        for message in seen.messages:
            conversation.say(message)
        if seen.done:
            break
    return said


def test_it_says_its_lines_then_leaves() -> None:
    assert play(ScriptedUser(["a", "b"]), chat("hi"), ["1", "2", "3", "4"]) == ["a", "b", "."]


def test_without_lines_it_reveals_the_goal_sentence_by_sentence() -> None:
    conversation = chat("hi", goal="I want tea. It must be green! Cold?")
    assert play(ScriptedUser(), conversation, ["1"] * 5) == ["I want tea.", "It must be green!", "Cold?", "."]


def test_a_row_can_bring_its_own_script() -> None:
    assert play(ScriptedUser(["x"]), chat("hi", script=["mine"]), ["1", "2"]) == ["mine", "."]


def test_it_leaves_once_it_is_answered() -> None:
    assert play(ScriptedUser(["a", "b", "c"]), chat("hi", reference="42"), ["421", "it is 42."]) == ["a", "."]
    stays = ScriptedUser(["a", "b"], leave_when_answered=False)
    assert play(stays, chat("hi", reference="42"), ["42", "42"]) == ["a", "b"]


def test_forks_continue_from_where_they_split() -> None:
    user, root = ScriptedUser(["a", "b"]), chat("hi")
    assert play(user, root, ["1"]) == ["a"]
    left, right = root.fork(0), root.fork(1)
    assert play(user, left, ["2"]) == ["b"] and play(user, right, ["2", "3"]) == ["b", "."]


def test_it_opens_an_empty_conversation() -> None:
    conversation = Conversation(Row("r", (), goal="I want tea."))
    user = users.create("scripted")
    asyncio.run(user.start(conversation))
    assert [m.content for m in conversation.messages] == ["I want tea."]
