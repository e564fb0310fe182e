"""The policy cannot profit from missing scores: those it causes count as the step's worst; others stay missing.

The policy is a bandit with three arms on hard rows: right, wrong, and one that makes its own score missing at will. The
mean of an update over all possible groups is a finite sum, so learning can be computed exactly.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.test_classmates import Recites, context
from tests.rollout.test_classmates import play as play_classmates
from tests.training.workshop import metrics, recipe
from upshot.config.recipe import CreditConfig
from upshot.core.conversation import Conversation, Message, Row, Sample, Turn
from upshot.core.score import Cause, Reason, Score
from upshot.models.base import ModelCallError
from upshot.rewards.advantages import grouped
from upshot.rewards.credit import Credit, MetricWeight, Reward, Span, credit_turns
from upshot.rewards.metric import Metric
from upshot.rollout.blame import BLAMED, blame
from upshot.rollout.episode import Policy
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import ReplyRule, RolloutContext, play_step
from upshot.rollout.reply import Future, Rollout
from upshot.run.run import train
from upshot.tasks.participants.base import Observation, Participant
from upshot.training.learner.distributed.pickling import dumps, loads
from upshot.training.loops import online_dpo
from upshot.training.loops.rl import set_advantages
from upshot.training.metrics.alarms import WINDOW, Alarms

ROW = Row("r", (Message("user", "?"),))
TALK = Talk({}, {"m": MetricWeight()})
RIGHT, WRONG = Score(1.0), Score(0.0)
ESCAPE = Score.missing(Reason.BAD_JSON)
OURS = [reason for reason in Reason if reason.cause is Cause.POLICY]


def conversation(words: int = 1, way: int = 0) -> Conversation:
    """The policy speaks, is answered, and so on; the futures differ after its first words."""
    turns = [Turn(ROW.messages[0])]
    for word in range(words):
        turns += [Turn(Message("user", "go on"))] if word else []
        turns.append(Turn(Message("assistant", "x"), Sample((1,), (2 + way * bool(word),), (-0.5,), "stop")))
    return Conversation(ROW, turns=tuple(turns))


def reply(*scores: Score, spoke: bool = True, by: str = "reply") -> Rollout:
    """A reply whose futures have these scores; `spoke`: whether the policy had a turn in each of them."""
    own = [
        Future(
            conversation(2 if spoke else 1, way),
            2,
            "user",
            scores={"m": score},
            path=(way,),
            forks=(2,),
            missing=score.reason,
        )
        for way, score in enumerate(scores)
    ]
    made = Rollout(conversation(), futures=own)
    made.reward, made.credit = Talk({}, {"m": MetricWeight()}, credit=CreditConfig(by=by)).score(made)
    return made


def value(one: Rollout) -> float | None:
    assert one.credit is not None
    return one.credit.parts["main"].value


def learned(estimator: str, escape: Score, blames: bool, group_size: int = 4) -> tuple[float, float]:
    """How often the third arm is drawn after the bandit has learned, and its share of all failures."""
    arms = (RIGHT, WRONG, escape)
    update: dict[tuple[int, ...], dict[int, float]] = {}
    for group in itertools.combinations_with_replacement(range(3), group_size):
        replies = [reply(arms[arm]) for arm in group]
        if blames:
            blame([replies, [reply(RIGHT), reply(WRONG)]], TALK)
        set_advantages([replies], grouped.estimator(estimator))
        advantages = [one.advantages[0] for one in replies]
        update[group] = {arm: own or 0.0 for arm, own in zip(group, advantages, strict=True)}
    logits = [math.log(p) for p in (0.05, 0.9, 0.05)]
    for _ in range(500):
        total = sum(map(math.exp, logits))
        chances = [math.exp(logit) / total for logit in logits]
        gradient = [0.0, 0.0, 0.0]
        for group, own in update.items():
            counts = [group.count(arm) for arm in range(3)]
            ways = math.factorial(group_size) / math.prod(map(math.factorial, counts))
            chance = ways * math.prod(p**n for p, n in zip(chances, counts, strict=True))
            for arm, advantage in own.items():
                for other in range(3):
                    gradient[other] += chance * counts[arm] * advantage * ((arm == other) - chances[other])
        logits = [logit + 0.2 * own / group_size for logit, own in zip(logits, gradient, strict=True)]
    return chances[2], chances[2] / (chances[1] + chances[2])


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("estimator", ["rloo", "grpo", "dr-grpo"])
def test_an_escape_is_learned_no_more_than_another_wrong_answer(estimator: str, group_size: int) -> None:
    wrong = learned(estimator, WRONG, True, group_size)
    assert learned(estimator, ESCAPE, True, group_size) == pytest.approx(wrong)
    assert wrong[0] < 0.01
    left_out = learned(estimator, ESCAPE, False, group_size)
    assert left_out[0] > 3 * wrong[0] and left_out[1] > 0.6, "left out it becomes what most failures are"


@pytest.mark.parametrize("reason", list(Reason))
def test_only_reasons_that_the_policy_can_cause_count_as_the_worst(reason: Reason) -> None:
    escaped, others = reply(Score.missing(reason)), [reply(RIGHT), reply(RIGHT)]
    logs = blame([[escaped, *others], [reply(WRONG), reply(RIGHT)]], TALK)
    assert value(escaped) == (0.0 if reason in OURS else None)
    assert logs == {BLAMED: 0.2 if reason in OURS else 0.0}
    assert escaped.reward.total.reason == reason, "what was measured stays as it was"


def test_the_documentation_lists_who_can_cause_which_reason() -> None:
    page = (Path(__file__).parents[2] / "docs/why/missing.md").read_text()
    for reason in Reason:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{reason}` |")]
        assert line.split("|")[2].strip().startswith(reason.cause), reason


def test_a_group_with_only_missing_scores_is_left_out() -> None:
    group = [reply(ESCAPE), reply(ESCAPE)]
    assert blame([group, [reply(RIGHT), reply(WRONG)]], TALK) == {BLAMED: 0.0}
    assert [value(one) for one in group] == [None, None]


def test_without_groups_the_whole_step_is_compared() -> None:
    step = [[reply(ESCAPE)], [reply(RIGHT)], [reply(Score(0.25))]]
    blame(step, TALK)
    assert value(step[0][0]) == 0.25


def test_a_user_who_fails_where_others_did_not_is_excluded_from_the_mean() -> None:
    lost = reply(RIGHT, ESCAPE, spoke=False)
    blame([[lost, reply(WRONG, WRONG)]], TALK)
    assert value(lost) == 1.0
    nobody = reply(ESCAPE, ESCAPE, spoke=False)
    blame([[nobody, reply(WRONG, RIGHT)]], TALK)
    assert value(nobody) == 0.0, "who makes every user fail has nobody to speak for it"


def test_a_future_that_fails_after_the_policys_own_words_counts_as_the_worst() -> None:
    lost = reply(RIGHT, ESCAPE)
    blame([[lost, reply(WRONG, RIGHT)]], TALK)
    assert value(lost) == 0.5
    machine = reply(RIGHT, Score.missing(Reason.CONNECTION))
    blame([[machine, reply(WRONG, RIGHT)]], TALK)
    assert value(machine) == 1.0


def test_a_branch_of_the_tree_cannot_profit_from_missing_either() -> None:
    talk = Talk({}, {"m": MetricWeight()}, credit=CreditConfig(by="tree"))
    lost, other = reply(RIGHT, ESCAPE, by="tree"), reply(WRONG, WRONG, by="tree")
    kept = lost.siblings[0]
    blame([[lost, other]], talk)
    assert [branch.reward.total.value for branch in lost.siblings[0]] == [1.0, 0.0]
    assert [branch.share for branch in lost.siblings[0]] == [0.5, 0.5] and lost.siblings[0] is kept
    pairs, _ = online_dpo.best_and_worst([kept], 0.1)
    assert pairs == [(kept[0], kept[1])]


def test_the_worst_of_a_metric_with_negative_weight_is_its_maximum() -> None:
    talk = Talk({}, {"m": MetricWeight(-1.0)})
    group = [reply(Score(3.0)), reply(ESCAPE), reply(Score(1.0))]
    for one in group:
        one.reward, one.credit = talk.score(one)
    blame([group], talk)
    assert [value(one) for one in group] == [-3.0, -3.0, -1.0]


def test_a_failed_episode_counts_as_the_worst_by_turns_and_in_pairs() -> None:
    failed = Rollout(conversation(2), reward=Reward(Score.missing(Reason.CRASHED)))
    failed.credit = credit_turns([Score(0.5), Score.missing(Reason.CRASHED)], failed.conversation, 1.0)
    whole = Rollout(conversation(2), reward=Reward(Score(0.75)))
    whole.credit = credit_turns([Score(0.25), Score(0.5)], whole.conversation, 1.0)
    blame([[failed, whole]], TALK)
    assert failed.credit is not None and {n: p.value for n, p in failed.credit.parts.items()} == {
        "turn 1": 0.75,
        "turn 2": 0.5,
    }
    assert failed.outcome.value == 0.75 and failed.reward.total.is_missing


def test_a_reply_without_a_thought_earns_the_worst_thoughts_part_for_all_tokens() -> None:
    none = Rollout(conversation(), reward=Reward(Score.missing(Reason.NO_THOUGHT)))
    none.credit = Credit({"main": RIGHT, "classmate": Score.missing(Reason.NO_THOUGHT)}, (Span(1, 2, ("main",)),))
    group = [none]
    for worth in (0.25, 0.75):
        one = Rollout(conversation(), reward=Reward(Score(1 + worth)))
        one.credit = Credit({"main": RIGHT, "classmate": Score(worth)}, (Span(1, 2, ("main", "classmate")),))
        group.append(one)
    blame([group], TALK)
    assert none.credit.spans == (Span(1, 2, ("main", "classmate")),)
    set_advantages([group], grouped.rloo)
    assert [one.advantages for one in group] == [[-0.25], [-0.25], [0.5]]


class Bandit(Policy):
    """Its reply is determined by its place in the group."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words

    async def reply(self, conversation: Conversation, role: str = "policy") -> Turn:
        """Speak."""
        said = self.words[int(conversation.key.split("#")[1].split("/")[0])]
        return conversation.say(Message("assistant", said), Sample((1,), (2,), (-0.5,), "stop"))


class Fragile(Participant):
    """Fails on a certain word."""

    async def observe(self, conversation: Conversation) -> Observation:
        """Answer."""
        if "crash" in conversation.turns[-1].message.content:
            raise RuntimeError("no such call")
        return Observation((Message("user", "and?"),), done=True)


class Verdict(Metric):
    """Right or wrong, by a judge that fails on some words."""

    async def score(self, conversation: Conversation) -> Score:
        """By what the policy said."""
        said = " ".join(turn.message.content for turn in conversation.turns if turn.sample)
        return Score.missing(Reason.BAD_JSON) if "break" in said else Score(float("right" in said))


@pytest.mark.parametrize(
    ("word", "more"),
    [
        ("break", {}),
        ("crash", {"environment": Fragile()}),
        ("", {"malformed": ReplyRule("missing")}),
        ("crash", {"rounds": 1}),
    ],
)
def test_played_for_real_breaking_a_component_earns_no_more_than_a_wrong_answer(
    word: str, more: dict[str, object]
) -> None:
    rounds = more.pop("rounds", 0)
    futures = Talk({"m": Verdict()}, {"m": MetricWeight()}, Fragile(), 2, rounds)  # type: ignore[arg-type]
    context = RolloutContext(Bandit(["right", "wrong", word]), futures, **more)  # type: ignore[arg-type]
    groups = asyncio.run(play_step(context, [ROW], 3, 0))
    assert [one.reward.total.value for one in groups[0]] == [1.0, 0.0, None]
    blame(groups, futures)
    set_advantages(groups, grouped.rloo)
    assert [one.advantages for one in groups[0]] == [[1.0], [-0.5], [-0.5]]


def test_a_rising_share_of_blamed_replies_raises_an_alarm() -> None:
    alarms = Alarms()
    said = [text for step in range(3 * WINDOW) for text in alarms.watch({BLAMED: 0.01 * step}, step)]
    assert len(said) == 1 and "reward.blamed=missing" in said[0]


def classmates_group(*replies: str, **options: Any) -> list[Rollout]:
    """Replies whose thoughts a classmate finishes; it is right for good ones and cannot read long ones."""
    said = iter(replies)

    def answer(text: str, seed: int) -> str:
        if "long" in text:
            raise ModelCallError("too_long", "the prompt has 9000 ids")
        return "1" if "good" in text else "0"

    made, _ = context(lambda text, seed: next(said), {"peer": Recites("peer", answer)}, samples=1, **options)
    (group,) = play_classmates(made, group_size=len(replies))
    travelled: list[Rollout] = loads(dumps(group))  # as on a cluster, where the comparison makes no calls
    fresh, _ = context(lambda text, seed: "", {"peer": Recites("peer", answer)}, samples=1, **options)
    blame([travelled], fresh.futures)
    return travelled


@pytest.mark.parametrize("escape", ["<think>long</think>1", "1"], ids=["too long", "no thought"])
@pytest.mark.parametrize("reward", ["vanilla", "without-thought"])
def test_a_thought_that_no_classmate_can_read_earns_the_same_as_a_useless_one(escape: str, reward: str) -> None:
    group = classmates_group("<think>good</think>1", "<think>bad</think>1", escape, reward=reward)
    found = [one.credit.parts["classmate"].value for one in group if one.credit is not None]
    assert found == [1.0, 0.0, 0.0]
    set_advantages([group], grouped.rloo)
    useless, escaped = ({a for a in one.advantages if a} for one in group[1:])
    assert useless == escaped == {-0.5}


def test_a_run_counts_blamed_replies_and_one_key_turns_it_off(tmp_path: Path) -> None:
    more = {"reward": {"metrics": ["tests.training.helpers:Sometimes"], "max_missing": 1}, "futures": {"rounds": 0}}
    lines = {}
    for name in ("worst", "missing"):
        reward = {**more["reward"], "blamed": name}
        train(recipe(tmp_path / name, warm=False, steps=1, more={**more, "reward": reward}))
        (lines[name],) = metrics(tmp_path / name)
    worst, left_out = lines["worst"], lines["missing"]
    lost = worst["reward/missing"]
    assert lost == worst["missing/not_a_score"] == left_out["reward/missing"] > 0
    assert worst["reward/blamed"] == lost / 12 and "reward/blamed" not in left_out
    assert worst["train/sequences"] == 12 and left_out["train/sequences"] == 12 - lost
