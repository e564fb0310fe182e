"""Missing thoughts, missing samples, absent references and zero weights must not distort the classmate signal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.test_classmates import ROWS, Recites, context, play, thinks
from tests.support.coverage import check
from upshot.core.conversation import Conversation, Message, Row
from upshot.core.score import Score
from upshot.models.base import ModelCallError
from upshot.rewards.advantages.grouped import Advantages, estimator, estimators
from upshot.rewards.credit import credit_sampled
from upshot.rollout.futures.classmates.futures import Classmates, asked_row
from upshot.rollout.futures.classmates.parts import weighted_mean
from upshot.rollout.reply import Rollout
from upshot.training.loops.rl import stop_if_missing

SAYS = ["<think>hm</think>1", "<think>so</think>0", "1", "0"]
"""Two replies with a thought, two without, each once right and once wrong."""


def says_in_turn(texts: Sequence[str]) -> Any:
    left = list(texts) * 4
    return lambda text, seed: left.pop(0)


def advantages(groups: Sequence[Sequence[Rollout]], name: str = "dr-grpo") -> Advantages:
    return estimator(name)([[reply.credit for reply in group] for group in groups])


def test_if_all_tokens_earn_the_part_a_reply_without_a_thought_keeps_the_main_signal() -> None:
    peer = Recites("peer", lambda text, seed: "1")
    groups = play(context(says_in_turn(SAYS), {"peer": peer}, tokens="all")[0], group_size=4)
    stop_if_missing(groups, 0.0)
    by_text = {}
    for reply, found in zip(groups[0], advantages(groups)[0], strict=True):
        assert reply.credit is not None and reply.credit.trains
        check(reply.credit, reply.conversation.mask)
        by_text[reply.conversation.turns[-1].message.content, len(reply.credit.spans[0].parts)] = found
    assert by_text["1", 1] == [0.5] and by_text["0", 1] == [-0.5], "against the main part of the whole group"
    assert by_text["1", 2] == [0.5] and by_text["0", 2] == [-0.5], "against those that have both parts"
    missing = [reply.credit.parts["classmate"] for reply in groups[0] if reply.credit is not None]
    assert {part.why for part in missing if part.is_missing} == {"the reply has no thought to hand on"}


ALONE = ["<think>hm</think>1", "1", "0", "0"]
"""Only the first reply has a thought; it is right, as the second is."""


@pytest.mark.parametrize("tokens", ["kept", "all"])
@pytest.mark.parametrize("name", estimators.names())
def test_the_only_thought_of_a_group_adds_nothing_and_keeps_the_main_signal(name: str, tokens: str) -> None:
    peer = Recites("peer", lambda text, seed: "1")
    groups = play(context(says_in_turn(ALONE), {"peer": peer}, tokens=tokens)[0], group_size=4)
    by_main = [[credit_sampled(reply.credit.parts["main"], [1]) for reply in groups[0] if reply.credit is not None]]
    assert len(peer.asked) == 1
    for own, (plain,) in zip(advantages(groups, name)[0], estimator(name)(by_main)[0], strict=True):
        assert plain and own == [pytest.approx(plain)] * len(own), "what the main part alone is worth"


@pytest.mark.parametrize("tokens", ["kept", "all"])
def test_a_thought_shorter_than_the_cuts_has_fewer_stretches_and_nothing_missing(tokens: str) -> None:
    peer = Recites("peer", lambda text, seed: "1" if "b" in text.split("<think>")[1] else "0")
    (reply,) = play(context(thinks("ab"), {"peer": peer}, reward="steps", cuts=4, tokens=tokens)[0])[0]
    assert reply.credit is not None
    assert {name: part.value for name, part in reply.credit.parts.items()} == {
        "main": 1.0, "classmate 2": 0.0, "classmate 4": 1.0
    }  # fmt: skip
    assert reply.reward is not None and reply.reward.total.value == 2.0 and reply.credit.trains
    check(reply.credit, reply.conversation.mask)
    assert all(not reply.credit.total(span.parts).is_missing for span in reply.credit.spans)


def test_the_gain_over_no_thought_survives_every_comparison_within_the_group() -> None:
    """The classmate is right half of the time without any thought: only a thought that helps beyond that earns
    something."""

    def answers(text: str, seed: int) -> str:
        return {"good": "1", "bad": "0"}.get(text.split("<think>\n")[1].split("\n")[0], str(seed % 2))

    said = says_in_turn([f"<think>{word}</think>1" for word in ("good", "bad", "dull", "good")])
    made, _ = context(said, {"peer": Recites("peer", answers)}, reward="without-thought", samples=64)
    groups = play(made, group_size=4)
    parts = [reply.credit.parts["classmate"].value for reply in groups[0] if reply.credit is not None]
    good, bad, dull = parts[0], parts[1], parts[2]
    assert good is not None and bad is not None and dull is not None
    assert 0.3 < good < 0.7 and bad == 0.0 and 0.0 <= dull < 0.2
    for name in ("dr-grpo", "grpo", "rloo", "separated", "gdpo"):
        found = []
        for reply, own in zip(groups[0], advantages(groups, name)[0], strict=True):
            assert reply.credit is not None
            found += [value or 0.0 for span, value in zip(reply.credit.spans, own, strict=True) if len(span.parts) == 2]
        # With the plain difference, as without any, the dull thought would be in the middle.
        assert found[0] - found[2] > 1.5 * (found[2] - found[1]) >= 0.0


def test_a_missing_baseline_sample_is_excluded_from_the_mean() -> None:
    asked: list[int] = []

    def verdict(text: str, seed: int) -> str:
        return "1" if "hm" in text else "broken" if seed % 2 else "0"

    made, _ = context(thinks("hm"), {"peer": Recites("peer", verdict)}, reward="without-thought", samples=8)
    assert isinstance(made.futures, Classmates)
    task = made.futures.panel.task
    plain = task.verify

    async def verify(conversation: Conversation) -> Score:
        if "broken" in conversation.turns[-1].message.content:
            asked.append(1)
            return Score.missing("timeout")
        return await plain(conversation)

    task.verify = verify  # type: ignore[method-assign]
    groups = play(made, group_size=3)
    assert 0 < len(asked) < 8
    assert [reply.credit.parts["classmate"].value for reply in groups[0] if reply.credit is not None] == [1.0] * 3


def test_a_baseline_that_failed_completely_is_asked_again_and_its_reason_reported() -> None:
    calls: list[str] = []

    def answers(text: str, seed: int) -> str:
        if "hm" not in text:
            calls.append(text)
            if len(calls) == 1:
                raise ModelCallError("connection", "refused")
        return "1" if "hm" in text else "0"

    made, _ = context(thinks("hm"), {"peer": Recites("peer", answers)}, reward="without-thought")
    first, second = play(made)[0][0], play(made)[0][0]
    assert first.credit is not None and first.credit.parts["classmate"].reason == "connection"
    assert second.credit is not None and second.credit.parts["classmate"].value == 1.0


@pytest.mark.parametrize("measure", ["likelihood", "mixed"])
@pytest.mark.parametrize("reference", [None, "", "  "])
def test_without_a_reference_the_likelihood_is_missing_and_no_call_is_made(measure: str, reference: str | None) -> None:
    peer = Recites("peer", lambda text, seed: "1")
    row = Row("blank", (Message("user", "question"),), None, reference)
    (reply,) = play(context(thinks("hm"), {"peer": peer}, measure=measure)[0], [row])[0]
    assert peer.asked == [] and reply.credit is not None
    part = reply.credit.parts["classmate"]
    assert part.reason == "bad_row" and part.why == "no reference answer for the likelihood"


def test_a_classmate_of_weight_0_is_logged_without_effect() -> None:
    def broken(text: str, seed: int) -> str:
        raise ModelCallError("connection", "refused")

    peers = {"judge": Recites("judge", broken), "guest": Recites("guest", lambda text, seed: "1")}
    named = ["judge", {"name": "guest", "weight": 0}]
    groups = play(context(thinks("hm"), peers, classmates=named)[0])
    credit = groups[0][0].credit
    assert credit is not None and credit.parts["classmate"].reason == "connection"
    assert groups[0][0].futures[-1].scores["classmate"].value == 1.0


@given(st.floats(0, 1), st.none() | st.floats(0, 1))
def test_a_weight_of_0_never_moves_the_mean(own: float, other: float | None) -> None:
    alone = weighted_mean({"a": Score(own)}, {"a": 1.0})
    beside = Score.missing("timeout") if other is None else Score(other)
    assert weighted_mean({"a": Score(own), "b": beside}, {"a": 1.0, "b": 0.0}).value == alone.value


@pytest.mark.parametrize("kind", ["other-question", "similar-question"])
def test_all_replies_of_a_group_are_tried_on_the_same_other_question(kind: str) -> None:
    rows = [Row(f"r{n}", (Message("user", f"question {n} about sums"),), None, str(n % 4)) for n in range(30)]
    made, _ = context(thinks("hm"), {"peer": Recites("peer", lambda text, seed: "1")}, reward=kind)
    assert isinstance(made.futures, Classmates)
    made.futures.others.__dict__["rows"] = rows
    groups = play(made, rows[:6], group_size=5)
    paired = [{reply.futures[-1].conversation.row.id for reply in group} for group in groups]
    assert all(len(others) == 1 for others in paired)
    assert all(row.id not in others for row, others in zip(rows, paired, strict=False))
    assert kind == "similar-question" or len(set.union(*paired)) > 2, "each row has its own"
    made.futures.others.seed = 1
    again = [{reply.futures[-1].conversation.row.id for reply in group} for group in play(made, rows[:6], 1)]
    assert again != paired, "the run's seed draws the pairs"


def test_the_baseline_has_the_same_conversation_as_the_thought() -> None:
    peer = Recites("peer", lambda text, seed: "1" if "hm" in text else "0")
    made, _ = context(thinks("hm"), {"peer": peer}, reward="without-thought")
    assert isinstance(made.futures, Classmates)
    (reply,) = play(made)[0]
    talk = Conversation(ROWS[1], 3, "talk")
    for message in (Message("assistant", "which one?"), Message("user", "the second question")):
        talk.say(message)
    last = reply.conversation.turns[-1]
    talk.turns = (*talk.turns, last)
    peer.asked.clear()
    asyncio.run(made.futures.baselines.ask(asked_row(talk)))
    (prompt,) = peer.asked
    assert prompt.index("which one?") < prompt.index("the second question") < prompt.index("<think>\n</think>")
    assert made.futures.baselines.known(asked_row(talk)) and not made.futures.baselines.known(
        replace(ROWS[1], messages=(Message("user", "something else"),))
    )


def test_a_resumed_run_does_not_repeat_baseline_calls() -> None:
    peer = Recites("peer", lambda text, seed: "1" if "hm" in text else "0")
    first, _ = context(thinks("hm"), {"peer": peer}, reward="without-thought")
    play(first)
    saved = first.futures.state()
    asked = len(peer.asked)
    second, _ = context(thinks("hm"), {"peer": peer}, reward="without-thought")
    second.futures.restore(saved)
    (reply,) = play(second)[0]
    assert len(peer.asked) == asked + 1 and reply.credit is not None
    assert reply.credit.parts["classmate"].value == 1.0


@pytest.mark.parametrize(("keep", "handed"), [(1, "so one"), (0.5, "so")])
def test_the_whole_reply_may_be_the_thought(keep: float, handed: str) -> None:
    peer = Recites("peer", lambda text, seed: "1")
    made, _ = context(lambda text, seed: "so one", {"peer": peer}, thought="reply", keep=keep)
    (reply,) = play(made)[0]
    assert peer.asked[0].endswith(f"<think>\n{handed}\n</think>\n\n")
    assert reply.credit is not None and reply.credit.parts["classmate"].value == 1.0
    (sample,) = reply.conversation.samples()
    kept = [span for span in reply.credit.spans if span.parts == ("main", "classmate")]
    said = len(sample.ids) - 1
    assert [span.stop - span.start for span in kept] == [int(said * keep)], "the end of the turn is nobody's thought"
    assert made.futures.measure([reply])["classmate/no_thought"] == 0.0
