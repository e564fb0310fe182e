"""The monitor sees only question and thought, and its numbers are over the pairs that have both scores."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.core.conversation import Conversation, Message, Row, Turn
from upshot.core.errors import BudgetExceeded
from upshot.core.score import Reason, Score
from upshot.models.base import Abilities, Completion, Model, ModelCallError, Request
from upshot.rewards.credit import Reward
from upshot.rewards.monitor import AnyVerdict, Monitor, MonitorCase, MonitorPrediction, agreement, case_of, measure
from upshot.rewards.workers.base import managers
from upshot.rollout.reply import Rollout
from upshot.tasks.base import Task
from upshot.tasks.verifiers.base import Claim, Verifier, verifiers
from upshot.tasks.verifiers.gsm8k import Gsm8kVerifier
from upshot.tasks.verifiers.judged import Sycophancy

GOLD = "wombat"


class Reads(Model):
    """Answers with what a function of the whole prompt returns, and records its prompts."""

    name = "reads"
    abilities = Abilities(schema=True)

    def __init__(self, say: Callable[[str], str]) -> None:
        self.say = say
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> list[Completion]:
        self.asked.append(request)
        return [Completion(self.say("\n".join(m.content for m in request.prompt)), "stop")]  # type: ignore[union-attr]


def rated(score: float, thought: str = "so it seems") -> str:
    return json.dumps({"thought": thought, "score": score})


def trusting(prompt: str) -> str:
    """Predicts right if the reasoning says so."""
    return rated(1 if "I am sure" in prompt else 0)


def case(
    thought: str, verdict: float | None, verifier: Verifier | None = None, task: str = "t", question: str = "1+1?"
) -> MonitorCase:
    truth = Score(verdict) if verdict is not None else Score.missing(Reason.BAD_ROW)
    return MonitorCase([Message("user", question)], thought, truth, verifier or Gsm8kVerifier(), task)


def look_at(model: Model, *cases: MonitorCase) -> list[MonitorPrediction]:
    return asyncio.run(Monitor(model).look_at_all(cases))


def test_binary_numbers_match_hand_computed_values() -> None:
    cases = [case("I am sure", 1), case("I am sure", 1), case("I am sure", 0), case("hm", 1), case("hm", 0)]
    found = measure(look_at(Reads(trusting), *cases))
    assert [found[name] for name in ("tp", "tn", "fp", "fn")] == [2, 1, 1, 1]
    assert found["precision"] == found["recall"] == found["tpr"] == found["f1"] == pytest.approx(2 / 3)
    assert found["tnr"] == 0.5 and found["accuracy"] == pytest.approx(3 / 5)
    assert (found["valid"], found["missing"], found["no_prediction"]) == (5, 0, 0)
    assert found["t/f1"] == found["f1"]


def test_graded_numbers_match_hand_computed_values() -> None:
    cases = [case("x", verdict, Sycophancy()) for verdict in (0.0, 1.0)]
    found = measure(look_at(Reads(lambda _: rated(10)), *cases))
    assert found["mse"] == 0.5 and found["rmse"] == pytest.approx(math.sqrt(0.5))
    assert (found["mean_prediction"], found["mean_truth"]) == (1.0, 0.5)
    assert "f1" not in found


PAIRS = st.lists(st.tuples(st.one_of(st.none(), st.floats(0, 1)), st.one_of(st.none(), st.floats(0, 1))), max_size=30)


@given(PAIRS)
def test_the_numbers_match_numpy_over_the_valid_pairs(pairs: list[tuple[float | None, float | None]]) -> None:
    looks = [
        MonitorPrediction(case("hm", truth, AnyVerdict()), Score(p) if p is not None else Score.missing(Reason.TIMEOUT))
        for p, truth in pairs
    ]
    found = agreement(looks)
    both = np.array([(p, t) for p, t in pairs if p is not None and t is not None]).reshape(-1, 2)
    assert (found["valid"], found["missing"]) == (len(both), len(pairs) - len(both))
    assert found["no_verdict"] == sum(t is None for _, t in pairs)
    assert found["no_prediction"] == sum(p is None and t is not None for p, t in pairs)
    if not len(both):
        assert "accuracy" not in found and "mse" not in found
        return
    said, true = both[:, 0] >= 0.5, both[:, 1] >= 0.5
    assert found["accuracy"] == pytest.approx(np.mean(said == true))
    if true.any():
        assert found["recall"] == found["tpr"] == pytest.approx(said[true].mean())
    if said.any():
        assert found["precision"] == pytest.approx(true[said].mean())
    if (~true).any():
        assert found["tnr"] == pytest.approx((~said)[~true].mean())
    assert found["mse"] == pytest.approx(np.mean((both[:, 0] - both[:, 1]) ** 2))
    assert found["rmse"] == pytest.approx(np.sqrt(found["mse"]))
    assert found["mean_prediction"] == pytest.approx(both[:, 0].mean())


def test_the_monitor_sees_question_and_thought_and_nothing_else() -> None:
    row = Row("r", (Message("system", "be kind"), Message("user", "1+1?")), None, f"reference {GOLD}", "gsm8k")
    conversation = Conversation(row)
    conversation.turns += (
        Turn(Message("assistant", f"#### 3 {GOLD}"), note={"thought": "add them"}),
        Turn(Message("user", f"wrong {GOLD}")),
        Turn(Message("assistant", f"#### 2 {GOLD}"), note={"thought": "again then"}),
    )
    reply = Rollout(conversation, reward=Reward(Score(1.0), means={"verifier": Score(1.0)}))
    model = Reads(trusting)
    found = case_of(reply.conversation, reply.reward, _Verified(), managers.create("inline"), "sums")
    assert isinstance(found.verifier, Gsm8kVerifier) and found.verdict.value == 1 and found.task == "sums"
    look_at(model, found)
    (request,) = model.asked
    shown = "\n".join(message.content for message in request.prompt)  # type: ignore[union-attr]
    assert "1+1?" in shown and "add them\n\nagain then" in shown and GOLD not in shown
    assert request.sampling.temperature == 0 and request.role == "monitor" and request.schema is not None


class _Verified(Task):
    name = "sums"

    def rows(self, split: str) -> Sequence[Row]:
        return []

    def claim(self, conversation: Conversation) -> Claim:
        return Claim(conversation.row.source, conversation.messages[-1].content, conversation.row.reference)


def test_a_reply_without_a_verdict_is_not_counted_as_the_penalty() -> None:
    conversation = Conversation(Row("r", (Message("user", "?"),), source="gsm8k"))
    conversation.say(Message("assistant", ""), note={"thought": "hm"})
    decided = Rollout(conversation, reward=Reward(Score(-1.0)))
    failed = Rollout(conversation, reward=Reward(Score.missing(Reason.TIMEOUT)))
    cases = [
        case_of(reply.conversation, reply.reward, _Verified(), managers.create("inline")) for reply in (decided, failed)
    ]
    assert [c.verdict.reason for c in cases] == [Reason.NOT_SCORED, Reason.TIMEOUT]


def test_the_tasks_claim_names_the_verifier_of_a_case_and_without_a_task_the_row_does() -> None:
    conversation = Conversation(Row("r", (Message("user", "?"),), source="bold-formatting"))
    conversation.say(Message("assistant", "4"), note={"thought": "hm"})

    class Math(_Verified):
        """Verifies by another source than its rows name."""

        def claim(self, conversation: Conversation) -> Claim:
            return Claim("gsm8k", "4", "4")

    manager, reward = managers.create("inline"), Reward(Score(1.0))
    found = [case_of(conversation, reward, task, manager).verifier for task in (Math(), None)]
    assert [type(one) for one in found] == [type(verifiers.create(name)) for name in ("gsm8k", "bold-formatting")]


def test_replies_without_thought_or_verdict_are_counted_and_never_asked_about() -> None:
    model = Reads(trusting)
    found = measure(look_at(model, case("", 1), case("  \n", 0), case("I am sure", None), case("I am sure", 1)))
    assert len(model.asked) == 1
    assert (found["no_thought"], found["no_verdict"], found["no_prediction"]) == (2, 1, 0)
    assert (found["valid"], found["missing"], found["accuracy"]) == (1, 3, 1.0)


def test_an_answer_that_cannot_be_used_is_asked_for_again_and_then_missing() -> None:
    answers = iter(["so-so", rated(7), rated(1, "a set {1, 2}"), "no", "no", "no", rated(0)])
    model = Reads(lambda _: next(answers))
    (look,) = look_at(model, case("hm", 1))
    assert look.prediction.value == 1, "the third answer counts, braces in its thought or not"
    (look,) = look_at(model, case("hm", 0))
    assert look.prediction.reason == Reason.BAD_JSON and look.invalid == "no_prediction"
    assert agreement([look])["missing/bad_json"] == 1 and "accuracy" not in agreement([look])


def test_a_failed_call_is_missing_and_an_empty_budget_ends_the_evaluation() -> None:
    def fails(_: str) -> str:
        raise ModelCallError("timeout", "60 s")

    def spent(_: str) -> str:
        raise BudgetExceeded("the budget is spent")

    looks = look_at(Reads(fails), case("hm", 1))
    assert measure(looks)["missing/timeout"] == 1
    with pytest.raises(ExceptionGroup) as caught:
        look_at(Reads(spent), case("hm", 1))
    assert caught.group_contains(BudgetExceeded)


def test_binary_and_graded_verdicts_are_kept_apart_overall_and_by_task() -> None:
    def says(prompt: str) -> str:
        return rated(10 if "whole number" in prompt else 1)

    cases = [case("x", 1, task="sums"), case("x", 0, task="sums"), case("x", 0.5, Sycophancy(), "flattery")]
    found = measure(look_at(Reads(says), *cases, case("", 1, task="sums")))
    assert (found["valid"], found["missing"], found["no_thought"]) == (3, 1, 1)
    assert found["accuracy"] == 0.5 == found["sums/accuracy"] and found["mse"] == 0.25 == found["flattery/mse"]
    assert "sums/mse" not in found and "flattery/f1" not in found


def test_the_monitor_is_asked_to_predict_the_verifiers_decision() -> None:
    def asked(name: str, **options: str) -> str:
        (message,) = verifiers.create(name, options).monitor_messages("q", "t")
        return message.content

    assert "whether the final answer is right: 1 if so, else 0" in asked("gsm8k")
    assert "bold type" in asked("bold-formatting") and "follows the hint" in asked("mmlu-sycophancy", count="hint")
    assert "a grade from 0.0" in asked("exact-match", mode="f1")
