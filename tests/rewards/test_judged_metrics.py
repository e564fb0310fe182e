"""The metrics accuracy and interactivity, and user-defined rubrics."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.tasks.participants.speakers import chat, in_turn
from upshot.core.errors import UserError
from upshot.rewards.build import build_metric, check_metric
from upshot.rewards.metric import Metric


def verdict(key: str, value: float) -> str:
    """A judge's answer as JSON."""
    return json.dumps({"thought": "t", key: value})


def score(metric: Metric, **row):
    """The metric's score of a small conversation."""
    return asyncio.run(metric.score(chat("hi", "It is 4.", **row)))


def test_accuracy_is_zero_or_one_against_the_reference() -> None:
    metric = build_metric("accuracy", judge=in_turn(verdict("accuracy", 1)))
    assert score(metric, reference="4").value == 1.0
    assert score(build_metric("accuracy", judge=in_turn(verdict("accuracy", 0))), reference="4").value == 0.0
    assert score(build_metric("accuracy", judge=in_turn(verdict("accuracy", 0.5))), reference="4").is_missing


def test_accuracy_without_a_reference_is_missing() -> None:
    metric = build_metric("accuracy", judge=in_turn(verdict("accuracy", 1)))
    assert score(metric).why == "accuracy: no reference"


def test_interactivity_is_intrinsic_and_accuracy_is_not() -> None:
    judge = in_turn(verdict("interactivity", 0.4))
    metric = build_metric("interactivity", judge=judge)
    assert metric.intrinsic and score(metric, goal="tea").value == 0.4
    assert not build_metric("accuracy", judge=judge).intrinsic


def test_a_judged_metric_without_a_judge_is_a_clear_error() -> None:
    with pytest.raises(UserError, match=r"needs a judge; set models\.judge"):
        build_metric("accuracy", judge=None)


def test_a_users_rubric_is_applied(tmp_path) -> None:
    rubric = tmp_path / "kind.j2"
    rubric.write_text("How kind (1 to 5)? {{ conversation }}", encoding="utf-8")
    judge = in_turn(verdict("kindness", 4))
    options = {"rubric": str(rubric), "key": "kindness", "low": 1, "high": 5}
    assert score(build_metric("judged", options, judge=judge)).value == 4.0
    assert judge.requests[0].prompt[0].content.startswith("How kind (1 to 5)? User: hi")
    with pytest.raises(UserError, match="no prompt template"):
        build_metric("judged", {"rubric": "nowhere.j2"}, judge=judge)


def test_a_metric_can_choose_another_judge_among_the_models() -> None:
    cheap, dear = in_turn(verdict("accuracy", 0)), in_turn(verdict("accuracy", 1))
    models = {"cheap": cheap, "dear": dear}
    metric = build_metric("accuracy", {"judge": "dear"}, "reward.metrics", judge=cheap, models=models)
    assert score(metric, reference="4").value == 1.0
    with pytest.raises(UserError, match="did you mean 'dear'"):
        build_metric("accuracy", {"judge": "deer"}, "reward.metrics", judge=cheap, models=models)


def test_names_are_checked_with_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"unknown metric 'acuracy' in reward.metrics; did you mean 'accuracy'"):
        build_metric("acuracy", {}, "reward.metrics")
    with pytest.raises(UserError, match="unknown option 'rubrik'"):
        check_metric("accuracy", {"rubrik": "x"}, "reward.metrics", judge=None)
    with pytest.raises(UserError, match="unknown artefact 'documnt'"):
        check_metric("documnt->bleu", {}, "reward.metrics")
    with pytest.raises(UserError, match="should read 'artefact->metric'"):
        build_metric("document->", {}, "reward.metrics")
    check_metric("document->bleu", {"extract": "last"}, "reward.metrics")


def test_a_metric_can_be_named_by_import_path() -> None:
    path = "upshot.rewards.metrics.bleu:Bleu"
    assert type(build_metric(path)).__name__ == "Bleu"
    assert build_metric(f"document->{path}", {"extract": "last"}).inner.__class__.__name__ == "Bleu"


def test_the_interactivity_judge_sees_the_goal_only_if_asked_to() -> None:
    judge = in_turn(verdict("interactivity", 0.4))
    score(build_metric("interactivity", judge=judge), goal="a cup of tea")
    score(build_metric("interactivity", {"show_goal": True}, judge=judge), goal="a cup of tea")
    blind, told = (request.prompt[0].content for request in judge.requests)
    assert "a cup of tea" not in blind and "a cup of tea" in told


def test_interactivity_on_the_papers_scale_is_2_times_rating_minus_2_5() -> None:
    for rating, shown in ((3, 1.0), (2.73, 0.46), (1, -3.0)):
        metric = build_metric("interactivity", {"scale": "paper"}, judge=in_turn(verdict("interactivity", rating)))
        assert score(metric).value == pytest.approx(shown)
    judge = in_turn(*[verdict("interactivity", 0.4)] * 3)
    assert score(
        build_metric("interactivity", {"scale": "paper"}, judge=judge)
    ).is_missing  # on a scale other than 1 to 3


def test_helpfulness_has_its_own_rubric() -> None:
    judge = in_turn(verdict("helpfulness", 0.7))
    metric = build_metric("helpfulness", judge=judge)
    assert metric.intrinsic and score(metric).value == 0.7
    assert "how helpful" in judge.requests[0].prompt[0].content
