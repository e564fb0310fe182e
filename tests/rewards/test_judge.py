"""Judges: structured ratings, checked for range; missing instead of a made-up number."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.tasks.participants.speakers import chat, in_turn, speaker
from upshot.core.score import Score
from upshot.models.base import Completion, ModelCallError, Request
from upshot.rewards.metrics.extraction import extract_artefact
from upshot.rewards.metrics.judged import JudgedMetric


def rate(model, **options) -> Score:
    """The judge's rating of a small conversation."""
    judge = JudgedMetric(options.pop("rubric", "interactivity"), model, key="interactivity", **options)
    return asyncio.run(judge.score(chat("hi", "Hello.", goal="tea", reference="green")))


def verdict(value) -> str:
    """A judge's answer as JSON."""
    return json.dumps({"thought": "because", "interactivity": value})


def test_a_rating_comes_with_its_thought_and_is_greedy() -> None:
    model = in_turn(verdict(0.75))
    score = rate(model)
    assert score.value == 0.75 and score.detail["thought"] == "because"
    assert model.requests[0].sampling.temperature == 0 and model.requests[0].role == "judge"


@pytest.mark.parametrize("value", [1.2, -0.1, True, None, "0.5", [1], float("1e9")])
def test_an_answer_without_a_rating_is_asked_again_then_missing(value) -> None:
    model = in_turn(verdict(value))
    score = rate(model)
    assert score.is_missing and score.why.startswith("interactivity: judge: ")
    assert len(model.requests) == 3
    assert rate(in_turn(verdict(value), verdict(0.5))).value == 0.5


def test_a_rating_out_of_range_is_missing_as_out_of_range() -> None:
    assert rate(in_turn(verdict(7))).why == "interactivity: judge: out_of_range: after 3 attempts"


@pytest.mark.parametrize("text", ["", "0.8", '{"thought": "x"}', '{"interactivity": 0.', '{"interactivity": NaN}'])
def test_a_malformed_answer_is_missing_and_never_zero(text: str) -> None:
    assert rate(in_turn(text)).value is None


def test_a_truncated_answer_has_its_own_reason() -> None:
    assert rate(in_turn(Completion('{"thought": "long', "length"))).reason == "truncated"


def test_a_failed_call_is_missing_with_its_reason() -> None:
    def fail(request: Request) -> str:
        raise ModelCallError("timeout")

    assert rate(speaker(fail)).reason == "timeout"


def test_whole_numbers_are_required_only_if_asked_for() -> None:
    assert rate(in_turn(verdict(0.5)), whole=True).why == "interactivity: judge: not_a_number: after 3 attempts"
    assert rate(in_turn(verdict(1.0)), whole=True).value == 1.0


def test_the_rubrics_show_what_they_need_and_the_last_message() -> None:
    conversation = chat("hi", "Hello.", "and?", "LAST WORD", goal="tea", reference="green")
    accuracy, interactivity = (
        JudgedMetric(name, in_turn("")).prompt(conversation) for name in ("accuracy", "interactivity")
    )
    for part in ("tea", "green", "User: and?", "Assistant: LAST WORD"):
        assert part in accuracy
    assert "green" not in interactivity and "Assistant: LAST WORD" in interactivity


def test_an_artefact_is_extracted_unchanged() -> None:
    text = '# T\n\n\tüber \\frac{1}{2} "q"\n'
    model = in_turn(json.dumps({"found": True, "document": text}))
    assert asyncio.run(extract_artefact(model, "document", chat("hi", "Hello."))) == text


def test_no_artefact_is_empty_but_a_failed_extraction_is_missing() -> None:
    absent = in_turn(json.dumps({"found": False, "document": ""}))
    assert asyncio.run(extract_artefact(absent, "document", chat("hi", "Hello."))) == ""
    broken = asyncio.run(extract_artefact(in_turn("no"), "document", chat("hi", "Hello.")))
    assert isinstance(broken, Score) and broken.reason == "bad_json"
