"""Rows with only a goal: the simulated user writes the opening, once for all replies that are compared."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import upshot
from tests.rollout.test_play import By
from tests.tasks.participants.speakers import in_turn, says, speaker
from tests.tiny import tiny_policy
from tests.training.workshop import recipe
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import UserError, user_error_in
from upshot.core.score import Reason
from upshot.models.base import ModelCallError, Request
from upshot.rewards.credit import MetricWeight
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, play_step
from upshot.rollout.reply import Rollout
from upshot.run.checks import find
from upshot.run.run import train
from upshot.tasks.participants.base import Participant
from upshot.tasks.users.llm import LLMUser
from upshot.tasks.users.scripted import ScriptedUser

GOALS = [Row("a", (), "the red one . and the big one ."), Row("b", (Message("system", "hi"),), "the blue one .")]


def replies(rows: list[Row], user: Participant | None, group_size: int = 3) -> list[list[Rollout]]:
    policy, _ = tiny_policy()
    futures = Talk({"m": By(lambda talk: 1.0)}, {"m": MetricWeight()}, user, 1, 0)
    return asyncio.run(play_step(RolloutContext(policy, futures, user=user), rows, group_size, 0))


def test_the_user_opens_and_every_reply_of_a_group_answers_the_same_words() -> None:
    said = iter(f"opening {number}" for number in range(9))
    user = LLMUser(model=speaker(lambda request: says(next(said))))
    groups = replies(GOALS, user)
    openings = [{reply.conversation.last("user").content for reply in group} for group in groups]  # type: ignore[union-attr]
    assert [len(opening) for opening in openings] == [1, 1] and openings[0] != openings[1]
    for reply in (reply for group in groups for reply in group):
        assert reply.conversation.messages[-1].role == "assistant" and reply.reward.total.value == 1.0
        assert reply.conversation.session["user"]["turns"] == 1
    assert groups[0][0].conversation.session is not groups[0][1].conversation.session


def test_rows_that_have_an_opening_keep_it() -> None:
    (group,) = replies([Row("c", (Message("user", "hello"),), "a goal")], ScriptedUser())
    assert [m.content for m in group[0].conversation.messages[:-1]] == ["hello"]


def test_a_failed_opening_costs_only_its_own_row_with_the_reason() -> None:
    def answer(request: Request) -> str:
        if "red" in str(request.prompt):
            raise ModelCallError("timeout", "too slow")
        return says("may I ask something?")

    first, second = replies(GOALS, LLMUser(model=speaker(answer), repairs=0))
    assert {reply.reward.total.reason for reply in first} == {Reason.TIMEOUT}
    assert all(reply.reward.total.value == 1.0 for reply in second)


def test_a_user_that_leaves_at_once_makes_the_row_missing() -> None:
    (group,) = replies(GOALS[:1], LLMUser(model=in_turn(says("[[TERMINATE CHAT]]"))))
    assert group[0].reward.total.reason == Reason.NOTHING_SAID


def test_a_missing_user_is_reported_before_the_run_and_during_it(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        replies(GOALS, None)
    assert "set futures.user" in str(user_error_in(raised.value))
    settings = recipe(tmp_path / "run", warm=False, more=collab(tmp_path) | {"futures": {"rounds": 0}})
    assert any("rows (such as" in finding.says and "set futures.user" in finding.says for finding in find(settings))


def collab(folder: Path) -> dict[str, object]:
    rows = [{"goal": f"I want {word} things .", "reference": word} for word in ["red", "blue", "green", "big", "small"]]
    (folder / "goals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "task": {"name": "collabllm", "train_file": str(folder / "goals.jsonl"), "tiny_words": 50},
        "reward": {"metrics": [{"name": "token_amount", "weight": -1}]},
        "futures": {"samples": 1, "rounds": 1, "user": "scripted"},
    }


def test_a_run_trains_on_goals_alone(tmp_path: Path) -> None:
    folder = train(recipe(tmp_path / "run", steps=1, warm=False, more=collab(tmp_path)))
    lines = [json.loads(line) for line in (folder.path / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 12
    for line in lines:
        assert line["opening"] == 0 and line["goal"].startswith("I want")
        assert [m["role"] for m in line["messages"]] == ["user", "assistant"]
        assert not line["messages"][0]["trained"] and line["messages"][1]["trained"]


def test_a_reply_that_opens_the_conversation_gets_a_reward() -> None:
    seen: list[int] = []

    class Length(Participant):
        async def observe(self, conversation: Conversation):  # type: ignore[no-untyped-def]
            seen.append(len(conversation.turns))
            return await ScriptedUser().observe(conversation)

    reply = upshot.reward(
        [], "Hello, what do you need?", goal="A poem. About rain.", policy=speaker(lambda request: "so"), user=Length(),
        metrics={"tests.training.helpers:Lottery": 1}, samples=1, rounds=1,
    )  # fmt: skip
    assert reply.reward.total.value is not None and seen == [1]
    with pytest.raises(UserError):
        upshot.reward([], "x", goal="y", rounds=1)
