"""pass@k, maj@k, turns, feedback and missing, over groups of replies that are ragged and partly missing."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.core.conversation import Conversation, Message, Row, Sample
from upshot.core.score import Score
from upshot.rewards.credit import Reward
from upshot.rollout.reply import Future, Rollout
from upshot.training.metrics.step import majority, pass_at_k, summarise, task_metrics


def reply(
    value: float | None, answer: str | None = None, turns: int = 1, level: str = "easy", **counts: float
) -> Rollout:
    row = Row("r", (Message("user", "?"),), source="gsm8k", meta={"difficulty": level})
    conversation = Conversation(row)
    for _ in range(turns):
        conversation.say(Message("assistant", "x"), Sample((), (1,), (0.0,), "stop"))
    conversation.counts = counts
    score = (
        Score(value, detail={"answer": answer}) if value is not None else Score.missing("timeout", "verifier: timeout")
    )
    future = Future(conversation.fork(0), scores={"verifier": score})
    return Rollout(conversation, futures=[future], reward=Reward(score, {}, {"verifier": score}))


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_one(solved: list[bool], k: int) -> None:
    found = pass_at_k(solved, k)
    if k > len(solved):
        assert found is None
    else:
        subsets = list(combinations(solved, k))
        assert found == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_the_majority_answer_decides_and_ties_share() -> None:
    assert majority([reply(1, "42"), reply(1, "42"), reply(0, "41")]) == 1
    assert majority([reply(1, "42"), reply(0, "41"), reply(0, "41")]) == 0
    assert majority([reply(1, "42"), reply(0, "41")]) == 0.5
    assert majority([reply(None), reply(0, None)]) is None


def groups_of(row: Row) -> dict[str, str]:
    return {"task": row.source, "difficulty": row.meta["difficulty"]}


def test_all_metrics_of_ragged_groups_match_hand_computed_values() -> None:
    groups = [
        [
            reply(1, "4", 2, feedback=1, feedback_used=1, wrong_feedback=1, wrong_feedback_used=1, format_errors=1),
            reply(0, "5"),
            reply(None),
        ],
        [reply(0, "1", level="hard"), reply(0, "1", 3, "hard", feedback=2, feedback_used=0, format_errors=3)],
    ]
    found = task_metrics(groups, groups_of)
    assert found["task/pass@1"] == 0.25
    assert found["task/pass@2"] == 0.5
    assert found["task/maj@k"] == 0.25
    assert found["task/turns"] == pytest.approx(8 / 5)
    assert found["task/feedback"] == pytest.approx(3 / 5)
    assert found["task/feedback_heeded"] == pytest.approx(1 / 3)
    assert found["task/feedback_heeded/wrong"] == 1
    assert found["task/format_errors"] == pytest.approx(4 / 5)
    assert found["task/missing"] == 1
    assert found["task/missing/timeout"] == 1
    assert found["by/difficulty=hard/pass@1"] == 0
    assert found["by/difficulty=easy/pass@1"] == 0.5
    assert found["by/task=gsm8k/maj@k"] == 0.25


def test_without_replies_there_is_no_value_instead_of_zero() -> None:
    assert task_metrics([], groups_of) == {"task/missing": 0.0}
    assert "task/pass@1" not in task_metrics([[reply(None)]], groups_of)


def test_the_shares_of_believed_and_unconfirmed_programs_are_over_the_replies_with_a_program() -> None:
    without, confirmed, believed, unconfirmed = reply(1.0), reply(1.0), reply(1.0), reply(0.0)
    assert "reward/believed" not in summarise([[without]])
    for one, more in ((confirmed, {}), (believed, {"believed": 2}), (unconfirmed, {"unconfirmed": 1})):
        one.futures[0].scores["verifier"] = Score(1.0, detail={"outcomes": [], **more})  # type: ignore[index]
    found = summarise([[without, confirmed, believed, unconfirmed]])
    assert found["reward/believed"] == found["reward/unconfirmed"] == pytest.approx(1 / 3)
    assert summarise([[confirmed]])["reward/unconfirmed"] == 0
