"""200 conversations over real HTTP with a server that drops, rate-limits, stalls and garbles."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.collabllm.stage import act, number_of, rows, scene
from tests.models.misbehaving_server import MisbehavingServer
from tests.patience import patience
from upshot.models.connect import connect
from upshot.rollout.play import play_step
from upshot.rollout.reply import Rollout

FAULTS = {"drop": 0.05, "limit_rate": 0.05, "malformed": 0.015, "bad_content": 0.015, "stall": 0.01}
"""5 % dropped, 5 % rate-limited with Retry-After, 3 % malformed JSON (of the envelope and of the content), 1 %
stalled."""


def play(retries: int) -> tuple[list[Rollout], MisbehavingServer, dict[str, float]]:
    """200 conversations of two rounds, every role behind the same server."""

    async def main():
        def reply(body) -> str:
            return act("\n".join(message["content"] for message in body["messages"]))

        async with MisbehavingServer(reply, **FAULTS, retry_after="0.05", keep_bodies=False, seed=3) as server:
            spec = {
                "url": server.url,
                "concurrency": 64,
                "timeout_s": patience(5),
                "retries": retries,
                "backoff_s": 0.02,
            }
            async with connect(spec) as model:
                groups = await play_step(scene(model), rows(200), 1, seed=0)
                return [group[0] for group in groups], server, model.stats()

    return asyncio.run(main())


def check(replies: list[Rollout]) -> Counter[str]:
    """Every goal stays in its own conversation, every score is right or missing with a reason. Returns the counted
    reasons."""
    reasons: Counter[str] = Counter()
    for reply in replies:
        number = int(reply.conversation.row.id.removeprefix("row")) + 1
        for future in reply.futures:
            said = "\n".join(turn.message.content for turn in future.conversation.turns)
            assert number_of(said) in (0, number), "a goal of another conversation"
            expected = {"accuracy": 1.0, "interactivity": (number + 1) / 1000}
            for name, score in future.scores.items():
                assert score.value != 0, "a silent zero"
                assert score.value is None or score.value == pytest.approx(expected[name])
                assert score.value is not None or score.reason
        if reply.reward.total.value is None:
            assert reply.reward.total.reason
            reasons[reply.reward.total.reason] += 1
        else:
            assert reply.reward.total.value == pytest.approx(1 + (number + 1) / 1000)
    return reasons


def test_two_hundred_conversations_complete_and_every_failure_is_retried() -> None:
    replies, server, stats = play(retries=6)
    assert len(replies) == 200
    assert not check(replies)
    for fault in ("dropped", "limited", "malformed", "stalled", "bad_content"):
        assert server.outcomes[fault] > 0, f"the server never {fault}: nothing was tested"
    calls = sum(value for name, value in stats.items() if name.endswith("/calls"))
    assert server.outcomes["ok"] + server.outcomes["bad_content"] == calls
    user = [reply.futures[0].conversation.counts for reply in replies]
    assert sum(metrics["user_broken_json"] for metrics in user) > 0


def test_without_retries_failures_are_missing_with_their_reasons_and_never_zero() -> None:
    replies, _, _ = play(retries=0)
    assert len(replies) == 200
    reasons = check(replies)
    assert 10 < sum(reasons.values()) < 190
    known = ("connection", "bad_response", "timeout", "rate_limited", "bad_json")
    assert all(any(word in reason for word in known) for reason in reasons), reasons
