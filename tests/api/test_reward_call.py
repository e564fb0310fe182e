"""`upshot.reward(...)`: the multiturn-aware reward as a library call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import upshot
from tests.collabllm.stage import act, actor
from tests.models.misbehaving_server import MisbehavingServer
from tests.tasks.participants.speakers import says
from tests.tiny import tiny_parts
from upshot.core.conversation import Conversation
from upshot.core.errors import BudgetExceeded, UserError
from upshot.core.score import Score
from upshot.core.time_limit import call_seconds
from upshot.models.client.budget import Budget
from upshot.rewards.metric import Metric
from upshot.rollout.play import ReplyRule
from upshot.rollout.reply import Rollout
from upshot.tasks.users.scripted import ScriptedUser

OPENING = [{"role": "user", "content": "Can you help me?"}]
GOAL = {"goal": "Sort out goal-7 for me.", "reference": "done"}


class Words:
    """A tokenizer whose tokens are words."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """One id per word."""
        return list(range(len(text.split())))


def roles(model=None) -> dict:
    """The same model in every role."""
    model = model or actor()
    return {"policy": model, "user": model, "judge": model}


def test_a_reply_gets_a_reward_with_its_breakdown_and_its_futures() -> None:
    reply = upshot.reward(OPENING, "What is it about?", **GOAL, **roles(), samples=3, rounds=2)
    assert reply.reward.total.value == pytest.approx(1.008)
    assert reply.reward.terms["accuracy"].value == 1.0
    assert reply.reward.extrinsic == 1.0 and reply.reward.intrinsic == pytest.approx(0.008)
    assert len(reply.futures) == 3
    assert [t.message.role for t in reply.futures[0].conversation.turns] == ["user", "assistant"] * 3


def test_several_replies_come_back_in_order() -> None:
    replies = upshot.reward(OPENING, ["What is it about?", "No."], **GOAL, **roles(), samples=1, rounds=1)
    assert [r.conversation.messages[-1].content for r in replies] == ["What is it about?", "No."]


def test_window_zero_scores_the_reply_itself_and_needs_no_user() -> None:
    reply = upshot.reward(OPENING, "Hi.", **GOAL, judge=actor(), rounds=0)
    assert len(reply.futures) == 1 and len(reply.futures[0].conversation.turns) == 2


def test_it_works_inside_a_running_loop() -> None:
    async def notebook():
        return upshot.reward(OPENING, "Hi.", **GOAL, judge=actor(), rounds=0)

    assert asyncio.run(notebook()).reward.total.value == pytest.approx(1.001)
    reply = asyncio.run(upshot.reward_async(OPENING, "Hi.", **GOAL, judge=actor(), rounds=0))
    assert reply.reward.total.value == pytest.approx(1.001)


def test_endpoints_by_address() -> None:
    async def main():
        async with MisbehavingServer(lambda body: act(body["messages"][-1]["content"])) as server:
            address = f"{server.url}#test-model"
            return await upshot.reward_async(
                OPENING, "Hm?", **GOAL, policy=address, user=address, judge=address, samples=2, rounds=1
            )

    assert asyncio.run(main()).reward.total.value == pytest.approx(1.008)


def test_weights_clamps_and_options() -> None:
    metrics = {"accuracy": 3, "interactivity": {"weight": 100, "clamp": None}, "token_amount": -0.5}
    reply = upshot.reward(OPENING, "one two", **GOAL, judge=actor(), rounds=0, metrics=metrics, tokenizer=Words())
    assert {name: part.value for name, part in reply.reward.terms.items()} == pytest.approx(
        {"accuracy": 1.0, "interactivity": 0.1, "token_amount": -1.0}
    )


@pytest.mark.parametrize(("rule", "total"), [("score", 1.001), ("penalty", -1.0), ("missing", None)])
def test_overlong_replies_follow_the_named_rule(rule: str, total: float | None) -> None:
    settings = {"judge": actor(), "rounds": 0, "tokenizer": Words(), "max_reply_tokens": 3, "overlong": rule}
    reply = upshot.reward(OPENING, "far too many words here", **GOAL, **settings)
    assert reply.reward.total.value == (pytest.approx(total) if total is not None else None)
    assert upshot.reward(OPENING, "just three words", **GOAL, **settings).reward.total.value == pytest.approx(1.001)
    own = upshot.reward(
        OPENING, "far too many words here", **GOAL, **(settings | {"overlong": ReplyRule("penalty", -3)})
    )
    assert own.reward.total.value == -3


def test_a_participant_can_be_the_user() -> None:
    reply = upshot.reward(
        OPENING, "Hm?", **GOAL, policy=actor(), judge=actor(), user=ScriptedUser(["about goal-7"]), samples=1, rounds=1
    )
    assert reply.futures[0].conversation.turns[2].message.content == "about goal-7"


def test_user_options_reach_the_user() -> None:
    seen: list[str] = []

    def say(prompt: str) -> str:
        seen.append(prompt)
        return says("ok then") if prompt.startswith("You play a person") else act(prompt)

    options = {"persona": "You are a very tall bear.", "task_description": "honey"}
    upshot.reward(OPENING, "Hm?", **GOAL, **roles(actor(say=say)), samples=1, rounds=1, user_options=options)
    assert any("tall bear" in prompt and "honey" in prompt for prompt in seen)


def test_wrong_settings_are_one_clear_line() -> None:
    with pytest.raises(UserError, match="did you mean 'rounds'"):
        upshot.reward(OPENING, "Hm?", ronds=1)
    with pytest.raises(UserError, match="needs policy= and user="):
        upshot.reward(OPENING, "Hm?", judge=actor())
    with pytest.raises(UserError, match="needs tokenizer="):
        upshot.reward(OPENING, "Hm?", judge=actor(), rounds=0, metrics={"token_amount": -1})
    with pytest.raises(UserError, match="did you mean 'accuracy'"):
        upshot.reward(OPENING, "Hm?", judge=actor(), rounds=0, metrics={"acuracy": 1})
    with pytest.raises(UserError, match="did you mean 'penalty'"):
        upshot.reward(OPENING, "Hm?", judge=actor(), rounds=0, overlong="penality")


def test_a_spent_budget_is_one_clear_line_too() -> None:
    with pytest.raises(BudgetExceeded, match="budget of 3 calls"):
        upshot.reward(
            OPENING,
            "Hm?",
            **GOAL,
            policy="scripted:ok",
            user="scripted:ok",
            judge="scripted:ok",
            budget=Budget(max_calls=3),
        )


def test_the_same_seed_gives_the_same_futures() -> None:
    def run(seed: int) -> list[list[str]]:
        reply = upshot.reward(OPENING, "Hm?", **GOAL, policy="scripted:echo", user="scripted:echo",
                              judge="scripted:ok", samples=2, rounds=1, seed=seed)  # fmt: skip
        return [[t.message.content for t in future.conversation.turns] for future in reply.futures]

    assert run(1) == run(1)


def test_a_policy_in_this_process_lends_its_tokenizer(tmp_path: Path) -> None:
    module, tokenizer, _, _ = tiny_parts()
    module.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = {"policy": f"local:{tmp_path}", "metrics": {"token_amount": {"clamp": None}}, "samples": 1}
    reply = upshot.reward(
        [{"role": "user", "content": "i want a red lamp"}], "which size ?", **settings, rounds=0, max_reply_tokens=9
    )
    assert reply.reward.means["token_amount"].value == len(tokenizer.encode("which size ?", add_special_tokens=False))


class Loops(Metric):
    """Computes forever."""

    async def score(self, conversation: Conversation) -> Score:
        while True:
            pass


def test_the_callers_time_limit_holds_inside_a_running_loop() -> None:
    async def notebook() -> Rollout:
        call_seconds.set(0.2)
        return upshot.reward(OPENING, "Hi.", **GOAL, metrics={f"{__name__}:Loops": 1}, rounds=0)

    assert asyncio.run(notebook()).reward.total.reason == "timeout"
