"""τ²-bench's own domains: run if its repository is installed, refused in one line if not."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import Any

import pytest

from tests.tasks.participants.speakers import in_turn
from upshot.core.conversation import Conversation
from upshot.core.errors import UserError
from upshot.rollout.episode import Policy, play_episode
from upshot.tasks.base import tasks
from upshot.tasks.dual.tau2 import Tau2Task
from upshot.tasks.participants.dual import DualControl
from upshot.tasks.users.plain import PlainUser

HERE = importlib.util.find_spec("tau2") is not None and importlib.util.find_spec("tau2.registry") is not None
CHECK = '<tool_call>{"name": "check_notifications", "arguments": {}}</tool_call>'
UPDATE = (
    '<tool_call>{"name": "update_task_status", "arguments": {"task_id": "task_1", "status": "completed"}}</tool_call>'
)


@pytest.mark.skipif(HERE, reason="τ²-bench is installed")
def test_without_the_repository_one_line_says_what_to_install() -> None:
    with pytest.raises(UserError, match="sierra-research/tau2-bench"):
        tasks.create("tau2", {"domain": "mock"})


@pytest.mark.skipif(not HERE, reason="needs τ²-bench, which is no package of PyPI")
class TestMock:
    def play(self, row: str, policy: list[str], user: list[str]) -> tuple[Tau2Task, Conversation]:
        task = Tau2Task("mock")
        conversation = Conversation(next(one for one in task.rows("train") if one.id == row))
        dual = DualControl(PlainUser(in_turn(*user), end_mark=["###STOP###"], task=task), task.environment())

        async def whole() -> None:
            await dual.start(conversation)
            await play_episode(conversation, Policy(in_turn(*policy)), dual, 6)

        asyncio.run(whole())
        return task, conversation

    def test_its_own_evaluator_rewards_what_its_tools_did(self) -> None:
        task, done = self.play("update_task_1", [UPDATE, "It is completed."], ["Please close task_1.", "###STOP###"])
        assert done.ended == "user"
        assert asyncio.run(task.verify(done)).value == 1
        task, idle = self.play("update_task_1", ["It is completed."], ["Please close task_1.", "###STOP###"])
        assert asyncio.run(task.verify(idle)).value == 0
        assert task.world(idle).get_db_hash() != task.world(done).get_db_hash()

    def test_only_the_user_has_the_users_tools_and_each_fork_has_its_own_state(self) -> None:
        user = [CHECK, "I was told of task_1, close it.", "###STOP###"]
        task, done = self.play("update_task_with_user_tools", [UPDATE, "Done."], user)
        assert [act["by"] for act in done.session["acts"]] == ["user", "policy"]
        fork = done.fork("future", 0)
        assert task.world(fork) is not task.world(done)
        assert task.world(fork).get_db_hash() == task.world(done).get_db_hash()
        assert asyncio.run(task.verify(done)).detail["parts"]


def solvable(task: Tau2Task) -> Any:
    """A task of the domain whose own solution is known and needs no model as a judge."""
    for one in task._tasks.values():
        wanted = one.evaluation_criteria
        judged = any(basis.value == "NL_ASSERTION" for basis in wanted.reward_basis)
        changes = [act for act in wanted.actions or () if not act.name.startswith(("get", "find", "search"))]
        if changes and not judged:
            return one
    return pytest.skip(f"no task of '{task.domain}' is judged without a model")


@pytest.mark.skipif(not HERE, reason="needs τ²-bench, which is no package of PyPI")
@pytest.mark.parametrize("domain", ["retail", "airline", "telecom"])
def test_a_domains_own_solution_played_by_both_sides_earns_its_reward_and_doing_nothing_none(domain: str) -> None:
    try:
        task = Tau2Task(domain)
        wanted = solvable(task)
    except UserError as error:
        pytest.skip(str(error))
    policy, user = [], ["Hello, I need help."]
    for act in wanted.evaluation_criteria.actions:
        made = f"<tool_call>{json.dumps({'name': act.name, 'arguments': act.arguments})}</tool_call>"
        if act.requestor == "assistant":
            policy.append(made)
        else:
            policy.append("Please do your part.")
            user += [made, "I did it."]
    policy.append(" ".join(["All done.", *(wanted.evaluation_criteria.communicate_info or ())]))

    def play(policy: list[str], user: list[str]) -> Conversation:
        conversation = Conversation(task._row(wanted.id))
        dual = DualControl(PlainUser(in_turn(*user), end_mark=["###STOP###"], task=task), task.environment())

        async def whole() -> None:
            await dual.start(conversation)
            await play_episode(conversation, Policy(in_turn(*policy)), dual, len(policy) + 1)

        asyncio.run(whole())
        return conversation

    done = play(policy, [*user, "###STOP###"])
    assert done.ended == "user" and all(act["good"] for act in done.session["acts"])
    assert asyncio.run(task.verify(done)).value == 1
    idle = play(["I cannot help you."], ["Hello, I need help.", "###STOP###"])
    assert asyncio.run(task.verify(idle)).value == 0
    worlds = [task.world(one) for one in (idle, done)]
    hashes = {(world.get_db_hash(), world.get_user_db_hash()) for world in worlds}
    assert len(hashes) == 2, "a world of its own each, in what the agent keeps or in what the user has"
