"""The monitor as a reward: the thought earns how predictable it makes the verdict, the answer does not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.coverage import check
from tests.tasks.participants.speakers import speaker
from upshot.config.load import load_recipe
from upshot.core.conversation import Conversation, Message, Row, Sample
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.rewards.credit import MAIN, Credit, MetricWeight, Reward, Span
from upshot.rewards.metrics.monitor import MonitorMetric
from upshot.rewards.workers.base import managers
from upshot.rollout.check_names import check_names
from upshot.rollout.futures.classmates.thought_cut import MASK, mask_answer
from upshot.rollout.futures.talk import Talk
from upshot.rollout.reply import Future, Rollout
from upshot.tasks.gsm8k import Gsm8k
from upshot.training.metrics.pull import correlate, describe_pull


def trusting(request: Any) -> str:
    """Predicts right if the reasoning says so."""
    return json.dumps({"thought": "", "score": int("I am sure" in request.prompt[-1].content)})


def reply(thought: str | None, answer: str = "#### 42") -> Conversation:
    conversation = Conversation(Row("r", (Message("user", "6 * 7?"),), None, "42", "gsm8k"))
    sample = Sample((1, 2), (3, 4, 5, 6), (-0.5,) * 4, "stop", thought=(0, 2) if thought else None, answer=2)
    conversation.say(Message("assistant", answer), sample, {"thought": thought} if thought else {})
    return conversation


@pytest.mark.parametrize(
    ("thought", "answer", "worth"),
    [("I am sure", "#### 42", 1), ("hm", "#### 42", 0), ("hm", "#### 41", 1), ("I am sure", "#### 41", 0)],
)
def test_a_thought_earns_how_well_the_verdict_is_predicted_from_it(thought: str, answer: str, worth: int) -> None:
    metric = MonitorMetric(Gsm8k(file="arithmetic", limit=2), managers.create("inline"), model=speaker(trusting))
    assert asyncio.run(metric.score(reply(thought, answer))).value == worth


def test_without_a_thought_there_is_nothing_to_predict_from() -> None:
    metric = MonitorMetric(Gsm8k(file="arithmetic", limit=2), managers.create("inline"), model=speaker(trusting))
    assert asyncio.run(metric.score(reply(None))).reason is Reason.NO_THOUGHT


WEIGHTS = {"verifier": MetricWeight(1.0), "monitor": MetricWeight(0.5, tokens="thought")}


def credited(monitor: Score) -> tuple[Reward, Credit]:
    rollout = Rollout(reply("hm"))
    rollout.futures = [Future(rollout.conversation, scores={"verifier": Score(1.0), "monitor": monitor})]
    return Talk({}, WEIGHTS).score(rollout)


def test_the_thought_earns_both_parts_and_the_answer_only_the_outcome() -> None:
    reward, credit = credited(Score(1.0))
    assert reward.total.value == 1.5 and reward.means["monitor"].value == 1
    assert {name: part.value for name, part in credit.parts.items()} == {MAIN: 1.0, "monitor": 0.5}
    assert credit.spans == (Span(2, 4, (MAIN, "monitor")), Span(4, 6, (MAIN,)))
    check(credit, reply("hm").mask)


def test_a_failed_monitor_leaves_the_thought_untrained_and_the_answer_unaffected() -> None:
    _, credit = credited(Score.missing(Reason.TIMEOUT))
    thought, answer = credit.spans
    assert credit.total(thought.parts).is_missing and credit.total(answer.parts).value == 1 and credit.trains


def test_methods_with_one_reward_per_reply_refuse_it() -> None:
    metrics = "reward.metrics=[verifier, {name: monitor, model: m, tokens: thought}]"
    recipe = load_recipe("recipes/quickstart.yaml", [metrics, "models.m=scripted:echo", "train.method=ppo"]).recipe
    with pytest.raises(UserError, match="metric 'monitor' with tokens needs rl"):
        check_names(recipe)


@pytest.mark.parametrize(
    ("thought", "answer", "left"),
    [
        ("6 * 7 = 42 . so 42", "#### 42", "6 * 7 = ___ . so ___"),
        ("that is 1,000.0 in all, not 10000", "1000", "that is ___ in all, not 10000"),
        ("42.5 is not 42", "42", "42.5 is not ___"),
        ("A train leaves. I choose (B), so B", "The answer is B", "A train leaves. I choose ___, so ___"),
        ("so it is 7", "in words", "so it is ___"),
        ("no number here", "none", "no number here"),
    ],
)
def test_the_final_number_or_letter_is_cut_from_the_thought(thought: str, answer: str, left: str) -> None:
    assert mask_answer(thought, answer) == left


@given(st.lists(st.integers(-999, 9999), min_size=1, max_size=8), st.integers(-999, 9999))
def test_only_numbers_equal_to_the_answer_are_cut(numbers: list[int], final: int) -> None:
    thought = " then ".join(map(str, numbers))
    expected = " then ".join(MASK if number == final else str(number) for number in numbers)
    assert mask_answer(thought, f"The answer is {final}.") == expected


def rollouts(pairs: list[tuple[float, float]]) -> list[Rollout]:
    out = []
    for verdict, part in pairs:
        one = Rollout(reply("hm"), reward=Reward(Score(verdict), means={"verifier": Score(verdict)}))
        one.credit = Credit({MAIN: Score(verdict), "monitor": Score(part)}, ())
        out.append(one)
    return out


def test_the_first_batch_reports_in_one_line_terms_that_oppose_the_outcome() -> None:
    against = [rollouts([(0, 1), (1, 0), (0, 1), (1, 0)]) for _ in range(8)]
    assert describe_pull(against) == (
        "the first batch: 'monitor' pulls the thought AGAINST the outcome (correlation -1.00 within prompts, "
        "32 replies): lower its weight, or gate it by the verdict"
    )
    along = [rollouts([(0, 0), (1, 1)]) for _ in range(8)]
    assert "pulls with the outcome (correlation +1.00" in describe_pull(along)
    easy_and_hard = [rollouts([(1, 1), (1, 1)]), rollouts([(0, 0), (0, 0)])]
    assert "do not vary within any prompt" in describe_pull(easy_and_hard), "what prompts have in common does not pull"
    plain = rollouts([(0, 1), (1, 0)])
    for one in plain:
        one.credit = Credit({MAIN: Score(1.0)}, ())
    assert describe_pull([plain]) == ""


@given(
    st.lists(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=5), min_size=1, max_size=6)
)
def test_the_correlation_matches_numpy_after_centring_by_group(groups: list[list[tuple[float, float]]]) -> None:
    centred = np.concatenate([np.array(group) - np.array(group).mean(0) for group in groups])
    found, count = correlate(groups)
    assert count == len(centred)
    if found is not None and min(np.square(centred).sum(0)) > 1e-6:
        assert found == pytest.approx((centred[:, 0] * centred[:, 1]).sum() / np.sqrt(np.square(centred).sum(0).prod()))
