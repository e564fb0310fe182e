"""Validity of a simulated user: the number, its interval, and the verdict; also the splits and the check of facts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.core.conversation import Conversation, Message
from upshot.core.score import Reason, Score
from upshot.offline.logs.goals import check_facts, goal_text
from upshot.offline.logs.read import LoggedConversation
from upshot.offline.logs.rows import fit_dialogues, prefixes
from upshot.offline.logs.store import TalkStore
from upshot.offline.logs.validity import calibrate, choose_replies, concordance, measure, simulate
from upshot.tasks.base import tasks

pairs_of = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=12)


@given(pairs_of)
def test_concordance_is_the_share_of_pairs_in_the_right_order(pairs: list[tuple[int, int]]) -> None:
    rights = [
        1.0 if (a - b) * (x - y) > 0 else 0.5 if a == b else 0.0
        for at, (a, x) in enumerate(pairs)
        for b, y in pairs[at + 1 :]
        if x != y
    ]
    found = concordance([(float(score), float(outcome)) for score, outcome in pairs])
    if not rights:
        assert found is None
    else:
        assert found is not None and found["value"] == pytest.approx(sum(rights) / len(rights))
        assert 0 <= found["low"] <= found["high"] <= 1


def test_with_two_outcomes_concordance_is_the_auc_and_its_interval_narrows() -> None:
    few = [(0.9, 1.0), (0.2, 0.0), (0.4, 1.0), (0.6, 0.0)]
    found, more = concordance(few), concordance(few * 20)
    assert found is not None and more is not None
    assert found["value"] == more["value"] == 0.75
    assert more["high"] - more["low"] < found["high"] - found["low"]


def lines(scores: list[float], outcomes: list[float], words: list[int] | None = None) -> list[dict[str, Any]]:
    words = words or [5] * len(scores)
    return [
        {"score": score, "outcome": outcome, "words": count, "depth": "last reply", "kind": "a" if at % 2 else "b"}
        for at, (score, outcome, count) in enumerate(zip(scores, outcomes, words, strict=True))
    ]


COIN, RIGHT = [0.0, 1.0] * 40, [0.1, 0.9] * 40


def test_a_simulation_that_predicts_may_be_trained_on() -> None:
    found = measure(lines(RIGHT, COIN), [{"words": 1, "outcome": 1.0}, {"words": 2, "outcome": 0.0}], 0.5)
    assert found["verdict"] == "good enough to train on" and found["text"].startswith("validity: good enough")
    assert set(found["groups"]) == {"all", "a", "b"}
    assert found["groups"]["a"]["concordance"] is None, "of one outcome nothing can be said"


def test_a_handful_of_replies_is_inconclusive() -> None:
    assert measure(lines(RIGHT[:20], COIN[:20]), [], 0.5)["verdict"] == "do not use"


def test_a_simulation_that_is_noise_is_not_recommended() -> None:
    found = measure(lines([0.1, 0.9, 0.9, 0.1] * 20, COIN), [], 0.5)
    assert found["verdict"] == "do not use"


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([0.8, 0.95] * 40, [5] * 80),
        (RIGHT, [1, 9] * 40),
        (([0.0, 1.0] + [0.5, 0.5] * 7) * 5, [5] * 80),
    ],
    ids=["too rosy", "length knows as much", "weak"],
)
def test_a_simulation_that_only_ranks_is_not_recommended_for_training(scores: list[float], words: list[int]) -> None:
    trained = [{"words": 1, "outcome": 0.0}, {"words": 2, "outcome": 1.0}]
    assert measure(lines(scores, COIN, words), trained, 0.5)["verdict"] == "only for ranking"


def test_missing_scores_are_counted_and_not_treated_as_zero() -> None:
    found = measure([*lines(RIGHT, COIN), {"outcome": 1.0, "missing": "timeout"}], [], 0.5)
    assert (found["replies"], found["missing"]) == (80, {"timeout": 1}) and found["simulated"] == pytest.approx(0.5)


def test_without_outcomes_or_scores_the_verdict_says_why() -> None:
    assert measure([], [], 0.5)["text"] == "validity: do not use (no held-out conversation has an outcome)"
    found = measure([{"outcome": 1.0, "missing": "too_long"}] * 3, [], 0.5)
    assert "0 held-out replies with a score" in found["text"] and "; 3 have no score: too_long)" in found["text"]


SAID = (Message("user", "hi"), Message("assistant", "hello"), Message("user", "bye"), Message("assistant", "bye"))


def play(total: Score, count: int = 1) -> tuple[list[Conversation], list[str | None]]:
    """The logged replies that are played and the failures that the job reports, if all replies have this score."""
    played: list[Conversation] = []
    failures: list[str | None] = []

    class Scorer:
        async def score_all(self, conversations: list[Conversation]) -> list[Any]:
            played.extend(conversations)
            return [SimpleNamespace(reward=SimpleNamespace(total=total))]

    class EachAtOnce:
        args = SimpleNamespace(seed=0)

        async def run(self, todo: list[Any], one: Any, *_: Any) -> None:
            for piece in todo:
                await one(piece)

        def write(self, line: Any, failure: str | None) -> None:
            failures.append(failure)

    job: Any = EachAtOnce()
    scorer: Any = Scorer()
    talks = [LoggedConversation(SAID, system="be kind", outcome=1.0, place=str(at)) for at in range(count)]
    asyncio.run(simulate(job, scorer, [(talk, 1) for talk in talks], lambda _: "goal", {}))
    return played, failures


def test_the_simulation_starts_from_the_logged_system_prompt_as_training_does() -> None:
    (conversation,), _ = play(Score(1.0))
    assert [m.content for m in conversation.messages] == ["be kind", "hi", "hello"]
    assert [m.role for m in conversation.row.messages] == ["system", "user"]


def test_a_simulation_that_cannot_answer_is_a_result_but_an_outage_is_not() -> None:
    assert play(Score.missing(Reason.BAD_ANSWER, "nothing"), 3)[1] == [None] * 3
    assert play(Score.missing(Reason.CONNECTION, "refused"), 2)[1] == ["connection"] * 2
    mostly_silent = [*lines(RIGHT, COIN), *[{"outcome": 1.0, "missing": "bad_answer"}] * 81]
    assert measure(mostly_silent, [], 0.5)["verdict"] == "do not use"


def test_replies_that_all_ended_alike_give_no_number() -> None:
    found = measure(lines(RIGHT, [1.0] * 80), [], 0.5)
    assert found["verdict"] == "do not use" and "all with the same outcome" in found["text"]


def test_calibration_bins_hold_all_replies() -> None:
    bins = calibrate(lines(RIGHT, COIN), 0.5)
    assert sum(own["n"] for own in bins) == 80
    assert (bins[0]["real"], bins[-1]["real"]) == (0.0, 1.0) and bins[0]["low"] <= 0.0 <= bins[0]["high"]


def talk(*said: str, **more: Any) -> LoggedConversation:
    messages = tuple(Message(("user", "assistant")[at % 2], text) for at, text in enumerate(said))
    return LoggedConversation(messages, **more)


def hold(talks: Iterable[LoggedConversation]) -> TalkStore:
    store = TalkStore(":memory:")
    store.fill(talks, 10**6)
    return store


def split(talks: Iterable[LoggedConversation], share: float, seed: int) -> tuple[list[int], list[int], str]:
    """Indexes of the training and the held-out conversations, and how they were chosen."""
    store = hold(talks)
    how = store.hold_out(share, seed)
    train, held_out = ([number - 1 for (number,) in store.rows("rowid", "held = ?", side)] for side in (0, 1))
    return train, held_out, how


def test_one_reply_of_a_conversation_is_chosen_by_the_seed() -> None:
    store = hold([talk("a", "b", "c", "d", outcome=1.0, place=str(n)) for n in range(20)] + [talk("a", "b")])
    chosen = choose_replies(store, False, 10, 3)
    assert chosen == choose_replies(store, False, 10, 3) != choose_replies(store, False, 10, 4)
    assert len({one.place for one, _ in chosen}) == 10 and {at for _, at in chosen} == {1, 3}


def test_facts_that_the_user_never_said_are_dropped_and_counted() -> None:
    said = talk("refund order 17 please", "your card ends with 4242")
    answer = {"goal": "a refund", "facts": ["order 17", "card ending 4242", "wants it by Monday"], "persona": "terse"}
    found = check_facts(answer, said)
    assert found["facts"] == ["order 17"] and found["dropped"] == 2
    assert goal_text(found) == "a refund; order 17" and goal_text(None) == ""


customers = st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=4, max_size=30)


@given(customers, st.integers(0, 5))
def test_no_customer_is_in_both_splits(names: list[str], seed: int) -> None:
    talks = [talk(f"hello {at}", "hi", customer=name) for at, name in enumerate(names)]
    train, held_out, _ = split(talks, 0.25, seed)
    assert sorted([*train, *held_out]) == list(range(len(talks)))
    assert not ({names[at] for at in train} & {names[at] for at in held_out}) - {""}


def test_without_customers_the_latest_are_held_out_and_without_times_the_same_words_stay_together() -> None:
    timed = [talk("a", "b", time=f"2026-01-{31 - n:02}") for n in range(20)]
    train, held_out, how = split(timed, 0.1, 0)
    assert (sorted(held_out), how) == ([0, 1], "the latest") and len(train) == 18
    mixed = [talk("a", "b", time=time) for time in ("2026-01-05", "1767700000", "1767500000000")]
    assert split(mixed, 0.3, 0)[1] == [1], "forms of times may be mixed"
    unsure = [talk(str(n), "b", time="01/05/2026" if n else "1767700000") for n in range(10)]
    assert split(unsure, 0.3, 0)[2] == "by what was said", (
        "of a time that cannot be read nobody knows whether it is late"
    )
    same = [talk(f"word {n % 5}", "b") for n in range(50)]
    train, held_out, _ = split(same, 0.2, 0)
    assert not {at % 5 for at in train} & {at % 5 for at in held_out}


def test_repeated_conversations_are_counted_and_so_are_those_whose_outcomes_differ() -> None:
    store = TalkStore(":memory:")
    store.fill([talk("a", "b", outcome=1.0), talk("a", "b", outcome=0.0), talk("c", "d"), talk("c", "d"), talk("e")], 9)
    assert store.describe_repeats() == [
        "2 conversations repeat the words of another one; 2 have the same words and different outcomes"
    ]
    store.fill([talk("a", "b"), talk("c", "d")], 9)
    assert store.describe_repeats() == []


def test_a_limit_on_conversations_keeps_an_even_sample() -> None:
    store = TalkStore(":memory:")
    store.fill((talk(str(n), "b") for n in range(1000)), 100)
    kept = [int(one.messages[0].content) for one in store.read()]
    assert kept == sorted(set(kept)) and len(kept) == 100
    assert all(5 <= sum(start <= n < start + 100 for n in kept) <= 15 for start in range(0, 1000, 100))


def test_one_model_for_all_roles_learns_all_three_of_them() -> None:
    user, assistant, verdict = fit_dialogues(talk("hi", "ho", outcome=1.0, system="Be brief."), "say hi", 0.5)
    assert [message.role for message in user] == ["system", "assistant", "user", "assistant"]
    assert user[-1].content == "[END]" and assistant[0].content == "Be brief."
    assert verdict[-1] == Message("assistant", "good") and "User: hi" in verdict[1].content
    assert len(fit_dialogues(talk("hi", "ho"), "say hi", 0.5)) == 2, "a missing outcome is not bad"


def test_prefixes_have_all_depths_in_their_logged_frequency(tmp_path: Path) -> None:
    own = talk("a", "b", "c", "d", outcome=1.0, place="x")
    rows = list(prefixes([(own, "goal"), (own, "goal"), (own, "other")], "train"))
    assert [len(row["prompt"]) for row in rows] == [1, 3] * 3
    assert rows[0]["extra_info"]["interaction_kwargs"]["single_turn_prompt"] == "goal"
    file = tmp_path / "rl.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    played = tasks.create("logs", {"train_file": str(file)}, "task").rows("train")
    assert len({row.id for row in played}) == len(rows), "common calls are trained on more often"
