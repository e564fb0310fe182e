"""Judged verdicts: ratings mapped to [0, 1], failures missing with the reason, prompts for judge and monitor."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.models.base import Completion, Model, ModelCallError, Request
from upshot.tasks.judged import JudgedTask as Task
from upshot.tasks.verifiers.base import binary_metrics, graded_metrics, verifiers
from upshot.tasks.verifiers.gsm8k import Gsm8kVerifier
from upshot.tasks.verifiers.judged import RubricVerifier, Sycophancy, with_rubric_read


class Says(Model):
    """A judge that answers from a list."""

    name = "says"

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.seen: list[Request] = []

    async def generate(self, request: Request) -> list[Completion]:
        self.seen.append(request)
        answer = self.answers.pop(0)
        if answer == "fail":
            raise ModelCallError("timeout")
        return [Completion(answer, "stop")]


def rating(number: float) -> str:
    return json.dumps({"thought": "because", "score": number})


@pytest.mark.parametrize(
    "name", ["sycophancy", "confidence", "longer-response", "unsafe-compliance", "general-quality"]
)
def test_every_behaviour_is_rated_from_one_to_ten(name: str) -> None:
    judge = Says(rating(1), rating(10))
    verifier = verifiers.create(name, judge=judge)
    low, high = (asyncio.run(verifier.verify("some answer", None, {"question": "why?"})) for _ in range(2))
    assert (low.value, high.value) == (0.0, 1.0)
    text = judge.seen[0].prompt[0].content  # type: ignore[union-attr]
    assert "why?" in text
    assert "some answer" in text
    assert judge.seen[0].sampling.temperature == 0


def test_a_bad_rating_is_asked_again_and_then_missing() -> None:
    good = Sycophancy(judge=Says("no json", rating(11), rating(4)))
    assert asyncio.run(good.verify("x", None, {})).value == pytest.approx(3 / 9)
    bad = Sycophancy(judge=Says("no", "no", "no"))
    assert asyncio.run(bad.verify("x", None, {})).reason == "bad_json"
    down = Sycophancy(judge=Says("fail"))
    assert asyncio.run(down.verify("x", None, {})).reason == "timeout"


DRAFT = '<think>Perhaps {"thought": "draft", "score": 9}? No.</think>'


@pytest.mark.parametrize("answer", [DRAFT + rating(4), 'opened in the prompt {"score": 9} </think>\n' + rating(4)])
def test_the_score_is_read_after_the_thought(answer: str) -> None:
    assert asyncio.run(Sycophancy(judge=Says(answer)).verify("x", None, {})).value == pytest.approx(3 / 9)


@pytest.mark.parametrize("answer", [DRAFT, DRAFT + " I would say nine.", DRAFT.removesuffix("</think>")])
def test_a_draft_score_inside_the_thought_is_ignored(answer: str) -> None:
    asked_again = Sycophancy(judge=Says(answer, answer, answer))
    assert asyncio.run(asked_again.verify("x", None, {})).reason == "bad_json"


def test_a_judge_that_quotes_the_think_marker_is_understood() -> None:
    answer = json.dumps({"thought": "the response ends with </think>", "score": 4})
    assert asyncio.run(Sycophancy(judge=Says(answer)).verify("x", None, {})).value == pytest.approx(3 / 9)


class Hangs(Model):
    """A judge that never answers."""

    name = "hangs"

    async def generate(self, request: Request) -> list[Completion]:
        await asyncio.Event().wait()
        raise AssertionError


def test_a_hanging_judge_is_missing_after_its_time_limit() -> None:
    score = asyncio.run(Sycophancy(judge=Hangs(), seconds=0.05).verify("x", None, {}))
    assert (score.reason, score.why) == ("timeout", "judge: took more than 0.05 s")


def test_a_rubric_comes_from_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rubric.md"
    file.write_text("Rate the rhyme.")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a poem"}\n')
    judge = Says(rating(3))
    options = Task(rubric=str(file), low=1, high=5, file=str(rows)).verifier_options
    verifier = RubricVerifier(**options, judge=judge)
    assert asyncio.run(verifier.verify("roses are red", "violets", {"question": "a poem"})).value == 0.5
    assert "Rate the rhyme." in judge.seen[0].prompt[0].content  # type: ignore[union-attr]
    assert "violets" in judge.seen[0].prompt[0].content  # type: ignore[union-attr]
    with pytest.raises(UserError, match="no rubric file"):
        with_rubric_read({"rubric": "missing.md"})
    assert with_rubric_read({"rubric": "Rate it.", "low": 2}) == {"rubric": "Rate it.", "low": 2}
    with pytest.raises(UserError, match="low must be below high"):
        RubricVerifier(rubric="x", low=5, high=5)


def test_options_of_a_claim_cannot_name_a_local_file(tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text("wombat")
    with pytest.raises(UserError, match="takes the text of a rubric, not the file"):
        RubricVerifier(rubric=str(file), judge=Says(rating(3)))


def test_without_a_judge_there_is_one_clear_error() -> None:
    with pytest.raises(UserError, match="needs a judge"):
        asyncio.run(Sycophancy().verify("x", None, {}))


def test_monitor_prompts_show_the_thought_and_ratings_become_scores() -> None:
    verifier = Gsm8kVerifier()
    (message,) = verifier.monitor_messages("1+1?", "I add them up.")
    assert "1+1?" in message.content
    assert "I add them up." in message.content
    assert verifier.read_rating(1, "fine") == Score(1, detail={"thought": "fine"})
    assert Sycophancy().read_rating(10, "").value == 1 and Sycophancy().read_rating(1, "").value == 0


def scores(*values: float | None) -> list[Score]:
    return [Score(v) if v is not None else Score.missing("x") for v in values]


def test_binary_agreement_counts_pairs_where_both_are_valid() -> None:
    found = binary_metrics(scores(1, 1, 0, 0, None, 1), scores(1, 0, 0, 1, 1, None))
    assert (found["tp"], found["tn"], found["fp"], found["fn"]) == (1, 1, 1, 1)
    assert (found["precision"], found["recall"], found["f1"], found["accuracy"]) == (0.5, 0.5, 0.5, 0.5)
    assert (found["tpr"], found["tnr"], found["valid"], found["missing"]) == (0.5, 0.5, 4, 2)


def test_undefined_rates_are_left_out_not_zero() -> None:
    found = binary_metrics(scores(0, 0), scores(0, 0))
    assert "precision" not in found
    assert "recall" not in found
    assert found["accuracy"] == 1


def test_graded_agreement_matches_hand_computed_values() -> None:
    found = graded_metrics(scores(0.0, 0.5, 1.0, None), scores(0.0, 0.5, 0.5, 1.0))
    assert found["mse"] == pytest.approx(0.25 / 3)
    assert found["rmse"] == pytest.approx((0.25 / 3) ** 0.5)
    assert found["mean_prediction"] == 0.5
    assert found["correlation"] == pytest.approx(0.8660, abs=1e-3)
    assert found["missing"] == 1
    assert "correlation" not in graded_metrics(scores(1, 1), scores(0, 1))
    assert Sycophancy().metrics(scores(1), scores(1))["mse"] == 0
    assert Gsm8kVerifier().metrics(scores(1), scores(1))["accuracy"] == 1
