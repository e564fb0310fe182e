"""The faults of the published recipe, one test each, named after them.

Faults 1 (no released verl runs it) and 9 (stale adapter) have files of their own beside this one; fault 7 (split by
row) is tested in `tests/offline/data/test_prepare.py`.
"""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from tests.collabllm.stage import act, actor, number_of, rows, run_virtual, scene, shown
from tests.models.misbehaving_server import MisbehavingServer
from tests.patience import patience
from tests.tasks.participants.speakers import chat, in_turn, says, speaker
from upshot.core.conversation import Conversation
from upshot.core.http_client import backoff
from upshot.models.base import Completion, ModelCallError, Request
from upshot.models.connect import connect
from upshot.rewards.build import build_metric
from upshot.rewards.metric import score_conversation
from upshot.rollout.play import play_step
from upshot.tasks.users.llm import LLMUser
from upshot.tasks.users.personas import PERSONAS, VAGUENESS


def test_fault_2_concurrent_conversations_shared_the_last_ones_goal() -> None:
    async def wandering(request: Request) -> str:
        await asyncio.sleep(hash(shown(request)) % 7 / 1000)  # conversations overtake each other
        return act(shown(request))  # asserts that no prompt contains two goals

    model = speaker(wandering)
    groups = asyncio.run(play_step(scene(model, samples=2), rows(100), 2, seed=0))
    for index, group in enumerate(groups):
        for reply in group:
            assert reply.reward.means["interactivity"].value == pytest.approx((index + 2) / 1000)
            for future in reply.futures:
                said = "\n".join(message.content for message in future.conversation.messages)
                assert number_of(said) == index + 1


def test_fault_3_the_last_assistant_turn_was_dropped_before_judging() -> None:
    judged: list[str] = []

    def say(prompt: str) -> str:
        if '"interactivity":' in prompt:
            judged.append(prompt)
        return act(prompt)

    groups = asyncio.run(play_step(scene(actor(say=say), rounds=2), rows(1), 1, seed=0))
    future = groups[0][0].futures[0].conversation
    assert [m.role for m in future.messages] == ["user", "assistant"] * 3
    last = future.messages[-1]
    assert last.role == "assistant" and judged[0].rstrip().count(f"Assistant: {last.content}") >= 1
    assert judged[0].count("Assistant: ") == 3


def test_fault_4_futures_and_metrics_ran_one_after_another() -> None:
    latency = 0.05
    play = lambda: play_step(scene(actor(latency, 1000), samples=8, rounds=2), rows(1), 4, seed=0)  # noqa: E731
    _, seconds = run_virtual(play)
    one_chain = 6 * latency  # reply, (user, policy) x 2, judge
    assert seconds == pytest.approx(one_chain, abs=0.01), "8 futures and 2 metrics take as long as one"


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        ("fails", "http_error"),
        ("not json", "bad_json"),
        ('{"thought": "it is', "bad_json"),
        (Completion('{"thought": "it is', "length"), "truncated"),
        ('{"thought": "great", "accuracy": 11}', "bad_answer"),
    ],
)
def test_fault_5_failures_scored_like_a_wrong_answer(judge, reason: str) -> None:
    def answer(request: Request):
        if judge == "fails":
            raise ModelCallError("http_500")
        return judge

    metric = build_metric("accuracy", judge=speaker(answer))
    scores = asyncio.run(score_conversation({"accuracy": metric}, chat("hi", "4", reference="4")))
    assert scores["accuracy"].value is None
    assert scores["accuracy"].reason == reason


def test_fault_5_a_failed_future_leaves_the_mean_of_the_others() -> None:
    calls = {"user": 0}

    def say(request: Request) -> str:
        prompt = shown(request)
        if prompt.startswith("You play a person"):
            calls["user"] += 1
            if calls["user"] == 1:
                raise ModelCallError("timeout")
        return act(prompt)

    groups = asyncio.run(play_step(scene(speaker(say), samples=3, rounds=1), rows(1), 1, seed=0))
    reply = groups[0][0]
    assert sorted(str(future.missing) for future in reply.futures) == ["None", "None", "timeout"]
    assert reply.reward.total.value == pytest.approx(1.002), "the mean of two, not of three with a zero in it"


def test_fault_6_the_parser_made_numbers_of_text_and_ate_backslashes() -> None:
    sloppy = '{"current_answer": "42", "thought": "007", "response": "why \\frac{1}{2}, not \\theta é “x”?"}'
    seen = asyncio.run(LLMUser(in_turn(sloppy)).observe(chat("hi", "Hello.")))
    assert seen.note["current_answer"] == "42" and seen.note["thought"] == "007"
    assert seen.messages[0].content == "why \\frac{1}{2}, not \\theta é “x”?"


def test_fault_8_bleu_counted_characters() -> None:
    reference = "the quick brown fox jumps over the lazy dog near the river"
    same_letters = "revir eht raen god yzal eht revo spmuj xof nworb kciuq eht"
    metric = build_metric("bleu")
    assert asyncio.run(metric.score(chat("hi", same_letters, reference=reference))).value < 0.05
    assert asyncio.run(metric.score(chat("hi", reference, reference=reference))).value == pytest.approx(1.0)


def test_fault_8_token_amount_had_a_unit_per_code_base() -> None:
    class Words:
        """A tokenizer with one token per word."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens, "markers that nobody sampled are not tokens of the reply"
            return list(range(len(text.split())))

    conversation = chat("one two three", "a b c", "x", "d e")
    score = asyncio.run(build_metric("token_amount", tokenizer=Words()).score(conversation))
    assert score.value == 5, "single tokens of the assistant, not thousands, not the user's"


def test_fault_10_no_timeout_no_limit_no_cost_and_a_minute_of_backoff() -> None:
    assert max(backoff(0, 0.2, random.Random(i)) for i in range(200)) < 1.0

    async def main():
        async with MisbehavingServer(
            lambda body: act(body["messages"][-1]["content"]), stall=0.1, latency=0.005, keep_bodies=False
        ) as server:
            spec = {
                "url": server.url,
                "concurrency": 8,
                "timeout_s": patience(0.3),
                "backoff_s": 0.01,
                "price_in": 1.0,
                "price_out": 2.0,
            }
            async with connect(spec) as model:
                groups = await play_step(scene(model, rounds=1), rows(10), 1, seed=0)
                return groups, server.most_in_flight, model.stats()

    groups, most, stats = asyncio.run(main())  # which a server that stalls forever does not delay
    assert most <= 8 + 4, "the limit holds (a stalled call that was given up still counts at the server)"
    assert stats["user/cost"] > 0 and stats["judge/latency_p50"] > 0
    transcript = json.dumps(groups[0][0].to_dict(step=0))
    assert "goal-1" in transcript and "thought" in transcript, "what was said, thought and scored is there to be read"


def test_fault_11_simulators_are_too_cooperative() -> None:
    goal = "Plan a three day trip to Lisbon for two people with a budget of six hundred euros and no museums"
    meek = says(f"Hello! {goal}.")
    user = LLMUser(in_turn(meek, says("want to go somewhere warm")), vagueness="high", persona="hurried")
    seen = asyncio.run(user.observe(chat("hi", "Hello, what is it?", goal=goal)))
    assert seen.messages[0].content == "want to go somewhere warm", "a pasted goal is asked for again"
    stubborn = LLMUser(in_turn(meek))
    asyncio.run(stubborn.observe(chat("hi", "Hello, what is it?", goal=goal)))
    assert stubborn.stats()["user_goal_pasted_rate"] == 1.0, "and counted where it stays"
    prompt = user.prompt(Conversation(rows(1)[0]))
    assert VAGUENESS["high"] in prompt and PERSONAS["hurried"] in prompt


def test_fault_11_a_user_that_answers_like_an_assistant_is_counted() -> None:
    user = LLMUser(in_turn(says("Certainly! Here is a step-by-step solution. I hope this helps!")))
    asyncio.run(user.observe(chat("hi", "Hello, what is it?", goal="tea")))
    assert user.stats()["user_role_flip"] == 1
