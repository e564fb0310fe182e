"""A mix follows its weights, and every row keeps its own environment, verifier and groups."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from upshot.core.conversation import Conversation, Message
from upshot.core.errors import UserError
from upshot.tasks.base import Task, tasks

SAMPLE = "tests/tasks/gsm8k_sample.jsonl"


def mix() -> Task:
    arithmetic = {"name": "gsm8k", "file": "arithmetic", "limit": 60, "weight": 3}
    slots = {"name": "slots", "rows_per_split": 40}
    return tasks.create("mix", {"tasks": [arithmetic, slots]})


def test_any_stretch_of_rows_follows_the_weights_and_ids_are_unique() -> None:
    rows = mix().rows("train")
    for start in range(0, len(rows) - 40, 40):
        counts = Counter(row.meta["mix_task"] for row in rows[start : start + 40])
        assert counts == {"gsm8k": 30, "slots": 10}
    assert len({row.id for row in rows}) == len(rows)
    assert [row.id for row in mix().rows("train")] == [row.id for row in rows]


def test_each_row_goes_to_its_own_task() -> None:
    task = mix()
    rows = {row.meta["mix_task"]: row for row in task.rows("train")}
    environment = task.environment()
    assert environment is not None

    async def play(name: str, reply: str) -> tuple[bool, float | None]:
        conversation = Conversation(rows[name])
        await environment.start(conversation)
        conversation.say(Message("assistant", reply))
        observation = await environment.observe(conversation)
        await environment.end(conversation)
        return observation.done, (await task.verify(conversation)).value

    right = f"#### {rows['gsm8k'].reference}"
    assert asyncio.run(play("gsm8k", right)) == (True, 1.0)
    assert asyncio.run(play("gsm8k", "no form")) == (False, 0.0)
    assert asyncio.run(play("slots", str(rows["slots"].reference))) == (True, 1.0)
    assert task.groups(rows["gsm8k"])["task"] == "gsm8k"
    assert task.groups(rows["slots"])["task"] == "slots"
    claim = task.claim(Conversation(rows["gsm8k"]))
    assert claim is None  # nothing said yet


def test_a_mistake_in_a_mix_is_named_with_its_position() -> None:
    with pytest.raises(UserError, match=r"unknown task 'gsm' in task\.tasks\.0"):
        tasks.create("mix", {"tasks": [{"name": "gsm"}]})
    with pytest.raises(UserError, match="second 'slots'"):
        tasks.create("mix", {"tasks": [{"name": "slots"}, {"name": "slots"}]})
    with pytest.raises(UserError, match="greater than 0"):
        tasks.create("mix", {"tasks": [{"name": "slots", "weight": 0}]})
