"""A score is a number, or missing for a countable reason."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from upshot.core.score import Reason, Score, describe_missing, mean_score
from upshot.models.base import ModelCallError
from upshot.rewards.credit import MetricWeight, combine


@pytest.mark.parametrize(
    "given", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), Fraction(1)]
)
def test_a_plain_number_becomes_a_score(given: Any) -> None:
    score = Score.of(given, "metric 'mine'")
    assert score == Score(1.0) and type(score.value) is float
    assert json.dumps(Score(given).to_dict()) == '{"value": 1.0}'


@pytest.mark.parametrize("given", [None, "1.0", [1.0], {}, float("nan"), np.float64("inf"), np.ones(3), object(), 1j])
def test_a_value_that_is_not_a_number_is_missing_and_named(given: Any) -> None:
    score = Score.of(given, "metric 'mine'")
    assert score.reason == Reason.NOT_A_SCORE and score.why.startswith("metric 'mine' returned ")


@pytest.mark.parametrize("given", [1e308, -1e31, Score(1e308), 10**400])
def test_a_number_out_of_range_is_missing_and_named(given: Any) -> None:
    score = Score.of(given, "metric 'mine'")
    assert score.reason == Reason.NOT_A_SCORE and "it should return a Score or a number within ±1e+30" in score.why
    within = [Score.of(number, "metric 'mine'") for number in (1e30, 1e30, -1e30)]
    assert mean_score(within).value == pytest.approx(1e30 / 3)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModelCallError("timeout", "after 9 s"), "timeout"),
        (ModelCallError("http_503"), "unavailable"),
        (ModelCallError("http_500"), "http_error"),
        (ModelCallError("user bad_json"), "bad_json"),
        (ModelCallError("words of somebody's own [/INST]"), "error"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "error"),
        (ValueError("unexpected [/INST] in reply 17"), "error"),
    ],
)
def test_every_failure_maps_to_a_reason_and_keeps_its_text_as_detail(error: Exception, reason: str) -> None:
    score = Score.failed(error, "episode")
    assert score.reason == reason and isinstance(score.reason, Reason)
    assert score.why.startswith("episode: ") and str(error).splitlines()[0] in score.why


def test_an_exception_whose_str_fails_is_missing_too() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert Score.failed(Mute(), "m").why == "m: Mute"


def test_a_free_text_reason_is_counted_as_other() -> None:
    score = Score.missing("no price in row 17", row=17)
    assert score.reason == "other" and score.detail == {"why": "no price in row 17", "row": 17}
    assert Score(None, "timeout").reason is Reason.TIMEOUT  # type: ignore[arg-type]


def test_a_missing_score_keeps_its_detail_on_the_way_to_the_reward() -> None:
    absent = Score.missing("timeout", "m: after 9 s")
    assert mean_score([absent, Score.missing("error"), absent]) == absent
    total = combine([{"m": absent}], {"m": MetricWeight()}).total
    assert total == Score.missing("timeout", "m: after 9 s", metric="m")
    assert describe_missing([total, Score(1.0), total, Score.missing("error")]) == [
        "2 x timeout: m: after 9 s",
        "1 x error",
    ]
