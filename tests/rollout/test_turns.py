"""Credit by turn: what a turn earned itself plus what came after it, discounted."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.test_play import By, Chatty
from tests.support.coverage import check
from tests.tiny import tiny_policy
from upshot.config.recipe import CreditConfig
from upshot.config.registry import path_of
from upshot.core.conversation import Conversation, Message, Row, Sample, Turn
from upshot.core.errors import user_error_in
from upshot.core.score import Score
from upshot.rewards.credit import Credit, MetricWeight, credit_turns
from upshot.rollout.credit.rules import WholeReply
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import RolloutContext, play_step
from upshot.rollout.reply import Rollout
from upshot.tasks.participants.base import Observation


def talk(turns: int) -> Conversation:
    """A conversation of this many policy turns of two tokens each."""
    sample = Sample((1,), (2, 3), (-1.0, -1.0), "stop")
    return Conversation(Row("r", ()), turns=tuple(Turn(Message("assistant", ""), sample) for _ in range(turns)))


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=6), st.floats(0, 1))
def test_a_turn_earns_the_discounted_sum_from_itself_on(rewards: list[float], gamma: float) -> None:
    credit = credit_turns([Score(r) for r in rewards], talk(len(rewards)), gamma)
    check(credit, talk(len(rewards)).mask)
    for turn, span in enumerate(credit.spans):
        expected = sum(gamma**k * reward for k, reward in enumerate(rewards[turn:]))
        assert credit.total(span.parts).value == pytest.approx(expected, abs=1e-9)


def test_a_missing_turn_makes_itself_and_earlier_turns_missing_but_not_later_ones() -> None:
    rewards = [Score(1.0), Score.missing("timeout"), Score(2.0)]
    credit = credit_turns(rewards, talk(3), 0.5)
    assert [credit.parts[f"turn {n}"].value for n in (1, 2, 3)] == [None, None, 2.0]
    credit = credit_turns(rewards, talk(3), 0.0)
    assert [credit.parts[f"turn {n}"].value for n in (1, 2, 3)] == [1.0, None, 2.0], "without discount only itself"


def played(futures: Talk, environment: Chatty, turns: int = 3) -> Rollout:
    policy, task = tiny_policy()
    context = RolloutContext(policy, futures, environment, max_turns=turns)
    return asyncio.run(play_step(context, task.rows("train")[:1], 1, 0))[0][0]


class Silent(WholeReply):
    def credit(self, reply: Rollout, total: Score) -> Credit:
        return None  # type: ignore[return-value]


class Raises(WholeReply):
    def credit(self, reply: Rollout, total: Score) -> Credit:
        raise KeyError("x")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Silent, r"credit\.by '.*:Silent': credit\(\) should return a Credit; it returned None"),
        (Raises, r"credit\.by '.*:Raises' raised KeyError: 'x' \(test_turns\.py, line"),
    ],
)
def test_a_users_credit_rule_is_named_by_path_and_its_faults_are_reported(rule: Any, message: str) -> None:
    futures = Talk({"m": By(lambda talk: 1.0)}, {"m": MetricWeight()}, credit=CreditConfig(by=path_of(rule)))
    with pytest.raises(Exception) as raised:  # of a group
        played(futures, Chatty())
    assert re.search(message, str(user_error_in(raised.value)))


def test_turn_scores_of_the_environment_and_the_final_verdict_add_up() -> None:
    class Strict(Chatty):
        async def observe(self, conversation: Conversation) -> Observation:
            spoken = sum(1 for _ in conversation.samples())
            return Observation((Message("user", "not sure yet"),), score=Score(-0.1 * spoken))

    futures = Talk({"m": By(lambda talk: 1.0)}, {"m": MetricWeight()}, credit=CreditConfig(by="turns", gamma=0.5))
    reply = played(futures, Strict())
    assert reply.credit is not None and reply.reward.total.value == 1.0
    last = -0.3 + 1.0
    second = -0.2 + 0.5 * last
    found = [reply.credit.parts[f"turn {n}"].value for n in (1, 2, 3)]
    assert found == pytest.approx([-0.1 + 0.5 * second, second, last])


def test_every_turn_may_have_its_own_futures() -> None:
    said = By(lambda talk: float(sum(1 for _ in talk.samples())))
    rule = CreditConfig(by="turns", gamma=0.0)
    futures = Talk({"m": said}, {"m": MetricWeight()}, Chatty(), samples=2, rounds=1, credit=rule)
    reply = played(futures, Chatty())
    assert [future.turn for future in reply.futures] == [0, 0, 1, 1, 2, 2]
    assert reply.credit is not None
    assert [reply.credit.parts[f"turn {n}"].value for n in (1, 2, 3)] == [2.0, 3.0, 4.0], "one turn more, each"
    shared = [future.shared for future in reply.futures]
    assert shared == [2, 2, 4, 4, 6, 6]


def test_a_longer_conversation_with_the_same_end_earns_nothing_by_it() -> None:
    """Every turn's futures estimate how the whole ends. If they were added up, asking until the turns run out would
    pay."""
    for by, rounds in (("turns", 1), ("turns", 0), ("tree", 1), ("reply", 1)):
        earned = set()
        for turns in (1, 2, 4):
            rule = CreditConfig(by=by)
            futures = Talk({"m": By(lambda talk: 0.5)}, {"m": MetricWeight()}, Chatty(), 2, rounds, rule)
            reply = played(futures, Chatty(), turns)
            assert reply.credit is not None
            earned |= {reply.reward.total.value, *(part.value for part in reply.credit.parts.values())}
            assert len(reply.credit.parts) == (turns if by == "turns" else 1)
        assert earned == {0.5}, by


def test_turn_scores_of_the_environment_add_up_beside_futures() -> None:
    class Fair(Chatty):
        async def observe(self, conversation: Conversation) -> Observation:
            return Observation((Message("user", "go on"),), score=Score(0.1))

    rule = CreditConfig(by="turns", gamma=0.5)
    futures = Talk({"m": By(lambda talk: 1.0)}, {"m": MetricWeight()}, Chatty(), 1, 1, rule)
    reply = played(futures, Fair())
    assert reply.credit is not None
    found = [reply.credit.parts[f"turn {n}"].value for n in (1, 2, 3)]
    assert found == pytest.approx([1 + 0.1 + 0.05 + 0.025, 1 + 0.1 + 0.05, 1 + 0.1])


def test_futures_fork_again_at_their_next_round_and_siblings_have_equal_weight() -> None:
    """One future ends at once, the other forks in two: the reply earns the mean over the two, not over the leaves."""

    class Leaves(Chatty):
        async def observe(self, conversation: Conversation) -> Observation:
            said = sum(turn.sample is not None for turn in conversation.turns)
            gone = said == 1 and "/future/0" in conversation.key
            return Observation((Message("user", "hm"),), done=gone, reason="user")

    worth = By(lambda talk: float(len(talk.turns) > 3))
    futures = Talk({"m": worth}, {"m": MetricWeight()}, Leaves(), [2, 2], 2, CreditConfig(by="tree"))
    reply = played(futures, Chatty(), 1)
    assert [future.path for future in reply.futures] == [(0,), (1, 0), (1, 1)]
    assert reply.reward.total.value == 0.5
    upper, lower = reply.siblings
    assert [(branch.share, branch.reward.total.value) for branch in upper] == [(0.5, 0.0), (0.5, 1.0)]
    assert [(branch.share, branch.start) for branch in lower] == [(0.25, 4), (0.25, 4)]
    one, other = (future.conversation for future in reply.futures[1:])
    assert one.turns[:4] == other.turns[:4] and one.key != other.key
