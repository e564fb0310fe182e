"""Playing a step: exact ids, ragged results, and failures that affect only themselves."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from tests.support.coverage import check
from tests.tiny import tiny_parts, tiny_policy
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.errors import BudgetExceeded, UserError, user_error_in
from upshot.core.score import Score
from upshot.models.base import ModelCallError
from upshot.rewards.advantages import grouped
from upshot.rewards.credit import MetricWeight
from upshot.rewards.metric import Metric
from upshot.rollout.episode import play_episode
from upshot.rollout.futures.talk import Talk
from upshot.rollout.play import ReplyRule, RolloutContext, play_step
from upshot.rollout.reply import Rollout
from upshot.tasks.participants.base import Observation, Participant
from upshot.training.learner.batch import data_of
from upshot.training.loops.rl import set_advantages, stop_if_missing
from upshot.training.metrics.step import summarise


class Chatty(Participant):
    """Always answers; ends after a number of its turns that is drawn per conversation, or never."""

    def __init__(self, last: Callable[[Conversation], int] = lambda talk: 99) -> None:
        self.last = last

    async def observe(self, conversation: Conversation) -> Observation:
        own = sum(m.role == "user" for m in conversation.messages)
        return Observation((Message("user", "not sure yet"),), done=own > self.last(conversation), reason="user")


class By(Metric):
    """A metric made from a function."""

    def __init__(self, function: Callable[[Conversation], float]) -> None:
        self.function = function

    async def score(self, conversation: Conversation) -> Score:
        return Score(self.function(conversation))


def scene(
    metric: Callable[[Conversation], float] = lambda talk: 1.0, samples: int = 1, rounds: int = 0, **changes: object
) -> tuple[RolloutContext, list[Row]]:
    policy, task = tiny_policy()
    futures = Talk({"m": By(metric)}, {"m": MetricWeight()}, Chatty(), samples, rounds)
    made = RolloutContext(policy, futures, **changes)  # type: ignore[arg-type]
    return made, list(task.rows("train")[:4])


def step(made: RolloutContext, rows: list[Row], group_size: int = 4, seed: int = 0) -> list[list[Rollout]]:
    return asyncio.run(play_step(made, rows, group_size, seed))


def test_the_ids_trained_are_the_ids_sampled_through_three_turns() -> None:
    policy, task = tiny_policy()
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    generate = policy.model.generate

    async def recording(request):  # type: ignore[no-untyped-def]
        (completion,) = await generate(request)
        seen.append((list(request.prompt), completion.ids))
        return [completion]

    policy.model.generate = recording  # type: ignore[method-assign]
    talk = Conversation(task.rows("train")[0])
    asyncio.run(play_episode(talk, policy, Chatty(), max_turns=3))
    assert len(seen) == 3
    for prompt, ids in seen:  # every prompt starts with everything seen and said before
        assert talk.ids[: len(prompt) + len(ids)] == [*prompt, *ids]
    from upshot.rewards.credit import credit_sampled

    reply = Rollout(talk, credit=credit_sampled(Score(1.0), talk.mask), advantages=[1.0, 1.0, 1.0])
    assert reply.credit is not None
    check(reply.credit, talk.mask)
    (datum,) = data_of(reply)
    trained = [i for i, bit in zip(datum.ids, datum.mask, strict=True) if bit]
    assert trained == [i for _, ids in seen for i in ids]
    assert datum.ids == [*seen[2][0], *seen[2][1]]


def test_observations_carry_their_role_tokens_and_no_loss() -> None:
    policy, task = tiny_policy()
    talk = Conversation(task.rows("train")[0])
    asyncio.run(play_episode(talk, policy, Chatty(), max_turns=2))
    tokens = policy.renderer.tokenizer.convert_ids_to_tokens(talk.ids)  # type: ignore[union-attr]
    first = len(next(talk.samples()).context) + len(next(talk.samples()).ids)
    observation = tokens[first:]
    start = observation.index("<|user|>")
    assert observation[start : start + 4] == ["<|user|>", "not", "sure", "yet"]
    assert talk.mask[first + start : first + start + 4] == [0, 0, 0, 0]


def test_a_reply_has_as_many_futures_as_samples_and_each_ends_with_the_policy() -> None:
    made, rows = scene(samples=3, rounds=2)
    for reply in (reply for group in step(made, rows) for reply in group):
        assert len(reply.futures) == 3
        for future in reply.futures:
            roles = [t.message.role for t in future.conversation.turns[len(reply.conversation.turns) :]]
            assert roles == ["user", "assistant"] * 2
            assert future.conversation.ended == "rounds"


def test_without_rounds_the_reply_itself_is_scored_once() -> None:
    seen: list[int] = []
    made, rows = scene(lambda talk: seen.append(len(talk.turns)) or 1.0, samples=5, rounds=0)
    groups = step(made, rows, 1)
    assert len(seen) == len(rows)
    assert all(len(reply.futures) == 1 for group in groups for reply in group)


def test_futures_may_have_different_lengths() -> None:
    made, rows = scene(lambda talk: float(len(talk.turns)), samples=4, rounds=3)
    made.futures.user = Chatty(lambda talk: talk.seed % 3)
    lengths = {len(f.conversation.turns) for g in step(made, rows) for r in g for f in r.futures}
    assert len(lengths) > 1


def test_a_metric_that_raises_is_missing_with_its_reason_and_not_in_the_statistics() -> None:
    """Four replies score 1, 0, missing, 0: the mean is 1/3, the advantages 2/3, −1/3, none, −1/3."""

    def metric(talk: Conversation) -> float:
        index = int(talk.key.split("#")[1][0])
        if index == 2:
            raise RuntimeError("judge fell over")
        return 1.0 if index == 0 else 0.0

    made, rows = scene(metric)
    groups = step(made, rows[:1])
    set_advantages(groups, grouped.dr_grpo)
    logs = summarise(groups)
    assert [reply.advantages[0] for reply in groups[0]] == pytest.approx([2 / 3, -1 / 3, None, -1 / 3])
    assert groups[0][2].reward.total.reason == "error"
    told = groups[0][2].reward.total.detail
    assert told["why"].startswith("m: RuntimeError: judge fell over (test_play.py, line ") and told["metric"] == "m"
    assert data_of(groups[0][2]) == []
    assert logs["reward/mean"] == pytest.approx(1 / 3)
    assert logs["reward/missing"] == 1
    assert logs["missing/error"] == 1
    stop_if_missing(groups, 0.5)


def test_a_missing_future_is_excluded_from_the_mean_of_its_reply() -> None:
    class Flaky(Chatty):
        async def observe(self, conversation: Conversation) -> Observation:
            if conversation.key.endswith("future/1"):
                raise ModelCallError("timeout", "after 120 s")
            return await super().observe(conversation)

    made, rows = scene(lambda talk: 2.0, samples=3, rounds=1)
    assert isinstance(made.futures, Talk)
    made.futures.user = Flaky()
    (reply,) = step(made, rows[:1], 1)[0]
    assert reply.reward.total.value == 2.0
    assert [future.missing for future in reply.futures] == [None, "timeout", None]
    assert reply.futures[1].scores["m"] == Score.missing("timeout", "future: timeout: after 120 s")


def test_a_step_in_which_too_much_is_missing_stops_with_the_reasons() -> None:
    def metric(talk: Conversation) -> float:
        raise ModelCallError("rate_limited")

    made, rows = scene(metric)
    with pytest.raises(Exception, match=r"16 of 16 replies have no reward \(16 x rate_limited: m: rate_limited\)"):
        stop_if_missing(step(made, rows), 0.5)


def test_a_step_that_trains_nothing_says_so_instead_of_an_empty_reason() -> None:
    made, rows = scene(lambda talk: 1.0)
    groups = step(made, rows)
    for reply in (reply for group in groups for reply in group):
        reply.credit = dataclasses.replace(
            reply.credit, spans=tuple(dataclasses.replace(span, parts=()) for span in reply.credit.spans)
        )
    with pytest.raises(UserError, match=r"16 of 16 replies have no reward \(they have scores, .*episode\.think\)"):
        stop_if_missing(groups, 0.5)


def test_an_empty_budget_stops_everything_at_once() -> None:
    def metric(talk: Conversation) -> float:
        raise BudgetExceeded("the budget of 10 calls is used up")

    made, rows = scene(metric)
    with pytest.raises(BaseExceptionGroup) as raised:
        step(made, rows)
    assert isinstance(user_error_in(raised.value), BudgetExceeded)


@pytest.mark.parametrize(("rule", "expected"), [("score", 1.0), ("penalty", -1.0), ("missing", None)])
def test_replies_cut_at_the_limit_follow_the_named_rule(rule: str, expected: float | None) -> None:
    made, rows = scene(samples=2, rounds=1, overlong=ReplyRule(rule))
    made.policy.sampling = made.policy.sampling.__class__(max_tokens=1)
    replies = [r for g in step(made, rows) for r in g if next(r.conversation.samples()).finish == "length"]
    assert replies
    assert {reply.reward.total.value for reply in replies} == {expected}


@pytest.mark.parametrize(("rule", "expected"), [("score", 1.0), ("penalty", -1.0), ("missing", None)])
def test_empty_replies_follow_the_named_rule(rule: str, expected: float | None) -> None:
    made, rows = scene(malformed=ReplyRule(rule))
    generate = made.policy.model.generate

    async def silent(request):  # type: ignore[no-untyped-def]
        (completion,) = await generate(request)
        return [dataclasses.replace(completion, text=" ", finish="stop")]

    made.policy.model.generate = silent  # type: ignore[method-assign]
    assert {r.reward.total.value for g in step(made, rows) for r in g} == {expected}


def test_one_seed_gives_one_step() -> None:
    def texts(seed: int) -> list[str]:
        made, rows = scene(samples=2, rounds=2)
        return [
            m.content
            for g in step(made, rows, seed=seed)
            for r in g
            for f in r.futures
            for m in f.conversation.messages
        ]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_sampled_log_probabilities_match_the_learners() -> None:
    """The same weights give the same numbers: the sampler's log-probabilities are those of the learner's forward, to
    1e-4."""
    from upshot.config.recipe import TrainConfig
    from upshot.training.learner.batch import Datum
    from upshot.training.learner.learner import Learner

    made, rows = scene(samples=1, rounds=2)
    module, tokenizer, _, _ = tiny_parts()
    learner = Learner(module, tokenizer, TrainConfig())
    for reply in (reply for group in step(made, rows) for reply in group):
        talk = reply.futures[0].conversation
        (ours,) = learner.logprobs([Datum(talk.ids, talk.mask)])
        pairs = [(a, b) for a, b, bit in zip(ours, talk.logprobs, talk.mask, strict=True) if bit]
        assert max(abs(a - b) for a, b in pairs) < 1e-4


def test_dr_grpo_of_a_lone_reward_is_zero() -> None:
    assert grouped.centred([None, 3.0, None]) == [None, 0.0, None]


def test_a_prompt_that_fills_the_context_is_missing_and_no_future_is_played() -> None:
    asked: list[str] = []
    made, rows = scene(lambda talk: asked.append("metric") or 1.0, samples=2, rounds=1)
    made.futures.user = Chatty(lambda talk: asked.append("user") or 99)
    made.policy.max_context = 4
    for reply in (reply for group in step(made, rows) for reply in group):
        assert reply.reward.total.reason == "too_long" and reply.reward.total.why.startswith("episode: ")
        assert reply.futures == [] and data_of(reply) == []
    assert asked == []


def test_an_episode_that_fills_the_context_is_scored_as_it_is_without_futures() -> None:
    made, rows = scene(samples=3, rounds=1, max_turns=9)
    made.environment, made.futures.user = Chatty(), None
    whole = step(made, rows[:1], 1)[0][0]
    made.policy.max_context = len(whole.conversation.ids) // 2
    asked: list[str] = []
    made.futures.user = Chatty(lambda talk: asked.append(talk.key) or 99)
    (reply,) = step(made, rows[:1], 1)[0]
    assert reply.conversation.ended == "length" and list(reply.conversation.samples())
    assert asked == [] and len(reply.futures) == 1 and reply.reward.total.value == 1.0


def test_a_metric_may_return_a_plain_number_and_other_values_are_missing_with_its_name() -> None:
    class Plain(Metric):
        def __init__(self, given: object) -> None:
            self.given = given

        async def score(self, conversation: Conversation) -> object:  # type: ignore[override]
            return self.given

    made, rows = scene()
    assert isinstance(made.futures, Talk)
    made.futures.metrics = {"half": Plain(0.5), "yes": Plain(True), "lost": Plain("very good")}
    made.futures.weights = {"half": MetricWeight(), "yes": MetricWeight(), "lost": MetricWeight(0.0)}
    (reply,) = step(made, rows[:1], 1)[0]
    assert reply.reward.total.value == 1.5
    lost = reply.futures[0].scores["lost"]
    assert lost.reason == "not_a_score" and "metric 'lost' returned 'very good' (str)" in lost.why


def test_replies_to_a_row_that_is_in_a_step_twice_have_distinct_keys() -> None:
    made, rows = scene()
    groups = step(made, [rows[0], rows[1], rows[0]], 2)
    keys = [reply.conversation.key.removeprefix(rows[0].id) for group in groups for reply in group]
    assert keys == ["#0", "#1", *(f"{rows[1].id}#{n}" for n in (0, 1)), "#2", "#3"]
    assert len({reply.conversation.seed for group in groups for reply in group}) == 6


def test_a_future_is_scored_while_other_replies_are_still_being_sampled() -> None:
    """The last reply begins only after the first score: if scoring waited for all replies, this would wait forever."""

    async def play() -> list[list[Rollout]]:
        scored = asyncio.Event()

        class Signals(Metric):
            async def score(self, conversation: Conversation) -> Score:
                scored.set()
                return Score(1.0)

        class Waits(Participant):
            async def start(self, conversation: Conversation) -> None:
                if conversation.key.endswith("#3"):
                    await scored.wait()

            async def observe(self, conversation: Conversation) -> Observation:
                return Observation((), done=True, reason="done")

        policy, task = tiny_policy()
        futures = Talk({"m": Signals()}, {"m": MetricWeight()}, Chatty(), 1, 1)
        return await play_step(RolloutContext(policy, futures, Waits()), list(task.rows("train")[:1]), 4, 0)

    ((*_, last),) = asyncio.run(play())
    assert last.reward.total.value == 1.0
