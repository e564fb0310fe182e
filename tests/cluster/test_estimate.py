"""Our estimators on verl's numbers."""

from __future__ import annotations

import pytest

from upshot.chat import Conversation, Message, Row, Sample
from upshot.cluster.estimate import advantages
from upshot.cluster.trajectory import Trajectory, trajectory_of
from upshot.recipe import Named
from upshot.rewards.credit import credit_sampled, credit_turns
from upshot.rewards.estimators.base import estimator
from upshot.rewards.reward import Reward
from upshot.rollout.reply import Reply
from upshot.score import Score

NAMES = ("grpo", "dr-grpo", "rloo", "gdpo", "separated", "reinforce++")


def reply(turns: int, rewards: list[Score], by_turns: bool) -> Reply:
    """An episode of turns with two sampled tokens each and one of context between them."""
    talk = Conversation(Row("r", (Message("user", "?"),)))
    for turn in range(turns):
        context = (1, 2, 3) if turn == 0 else (4,)
        talk.say(Message("assistant", "x"), Sample(context, (7, 8), (-1.0, -1.0), "stop"))
    total = rewards[-1]
    credit = credit_turns(rewards, talk, 1.0) if by_turns else credit_sampled(total, talk.mask)
    return Reply(talk, reward=Reward(total), credit=credit)


def on_verl(groups: list[list[Reply]], named: Named, by_turns: bool) -> list[list[float]]:
    """What verl would compute of the replies: rows in any order, padded to one length, a padding row among them."""
    rows = [(group, trajectory_of(one, 99, 99)) for group, own in enumerate(groups) for one in own]
    there = [(group, row) for group, row in rows if isinstance(row, Trajectory)]
    width = max(len(row.response_ids) for _, row in there)
    scores = [row.token_scores + [0.0] * (width - len(row.token_scores)) for _, row in there] + [[0.0] * width]
    masks = [row.response_mask + [0] * (width - len(row.response_mask)) for _, row in there] + [[0] * width]
    found = advantages(scores, masks, [*(str(group) for group, _ in there), "pad0"], named, by_turns)
    assert found[-1] == [0.0] * width
    return found[:-1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by_turns", [False, True])
def test_local_mode_and_verl_compute_the_same_advantages(name: str, by_turns: bool) -> None:
    groups = [
        [reply(2, [Score(0.25 * n), Score(1.0 - n)], by_turns) for n in range(3)],
        [reply(1, [Score(float(n))], by_turns) for n in (0, 2, 2)],
    ]
    local = estimator(name)([[one.credit for one in group] for group in groups])
    found = iter(on_verl(groups, Named(name=name), by_turns))
    for group, own in zip(groups, local, strict=True):
        for one, spans in zip(group, own, strict=True):
            assert one.credit is not None
            row, first = next(found), 3  # the prompt is no part of verl's rows
            for span, value in zip(one.credit.spans, spans, strict=True):
                assert row[span.start - first : span.stop - first] == pytest.approx([value, value])


def test_the_lone_survivor_of_a_group_gets_zero_and_not_its_raw_score() -> None:
    group = [reply(1, [Score(5.0)], False), reply(1, [Score.missing("timeout")], False)]
    assert on_verl([group], Named(name="grpo"), False) == [[0.0, 0.0]]


def test_a_reply_with_a_missing_turn_leaves_as_a_whole_so_that_turns_stay_in_order() -> None:
    lost = reply(2, [Score.missing("timeout"), Score(1.0)], True)
    found = trajectory_of(lost, 99, 99)
    assert isinstance(found, Score) and found.reason == "timeout"


def test_tokens_of_the_environment_have_no_mask_and_no_score() -> None:
    found = trajectory_of(reply(2, [Score(1.0), Score(2.0)], True), 99, 99)
    assert isinstance(found, Trajectory)
    assert found.prompt_ids == [1, 2, 3] and found.response_ids == [7, 8, 4, 7, 8]
    assert found.response_mask == [1, 1, 0, 1, 1]
    assert found.token_scores == [0.0, 3.0, 0.0, 0.0, 2.0]
