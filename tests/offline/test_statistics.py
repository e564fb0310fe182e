"""Intervals have their coverage, p-values are calibrated, and missing values are not zeros."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upshot.offline.statistics import bootstrap, compare, estimate, macro, sign_flip_p, wilson

values = st.lists(st.floats(-10, 10), min_size=1, max_size=30)


def test_no_values_have_no_mean() -> None:
    assert estimate([]) is None and compare({"a": 1.0}, {"b": 2.0}) is None


@settings(deadline=None, max_examples=30)
@given(values)
def test_the_interval_holds_the_mean_and_stays_within_the_data(data: list[float]) -> None:
    found = bootstrap(data)
    assert found.n == len(data)
    slack = 1e-9
    assert min(data) - slack <= found.low <= found.mean + slack and found.mean - slack <= found.high
    assert found.high <= max(data) + slack


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = random.Random(1)
    hits = 0
    for trial in range(200):
        found = estimate([rng.gauss(0.3, 1.0) for _ in range(60)], seed=trial)
        assert found is not None
        hits += found.low <= 0.3 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=8))
def test_the_exact_p_value_is_the_share_of_sign_flips(differences: list[float]) -> None:
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
            for signs in product((1, -1), repeat=len(differences))]  # fmt: skip
    expected = sum(s >= abs(sum(differences)) for s in sums) / len(sums)
    assert sign_flip_p(differences) == pytest.approx(expected)


def test_random_sign_flips_agree_with_the_exact_test() -> None:
    rng = random.Random(0)
    differences = [rng.gauss(0.4, 1.0) for _ in range(12)]
    exact = sign_flip_p(differences)
    from upshot.offline import statistics

    before, statistics.EXACT_UP_TO = statistics.EXACT_UP_TO, 0
    try:
        assert sign_flip_p(differences) == pytest.approx(exact, abs=0.02)
    finally:
        statistics.EXACT_UP_TO = before


def test_under_no_difference_small_p_values_are_as_rare_as_they_claim() -> None:
    rng = random.Random(2)
    small = sum(sign_flip_p([rng.gauss(0, 1) for _ in range(20)], seed=i) < 0.05 for i in range(300))
    assert small <= 30


def test_pairing_finds_what_two_intervals_miss() -> None:
    """Goals differ much more than the models do: the intervals overlap, but the paired test finds the difference."""
    rng = random.Random(3)
    base = {str(i): rng.gauss(0, 5) for i in range(40)}
    better = {goal: value + 0.5 + rng.gauss(0, 0.2) for goal, value in base.items()}
    found = compare(better, base)
    one, two = estimate(list(base.values())), estimate(list(better.values()))
    assert found is not None and one is not None and two is not None
    assert one.high > two.low and found.p_value < 0.001 and found.estimate.mean == pytest.approx(0.5, abs=0.1)


def test_only_goals_that_both_have_are_compared() -> None:
    found = compare({"a": 1.0, "b": 1.0, "only": 100.0}, {"a": 0.0, "b": 0.0, "other": -100.0})
    assert found is not None and found.estimate.n == 2 and found.estimate.mean == 1.0
    assert found.p_value == 0.5  # two pairs cannot be significant


def test_scores_of_zero_and_one_that_all_agree_still_have_an_interval() -> None:
    found = estimate([1.0] * 10)
    assert found is not None and found.mean == found.high == 1.0 and found.low == pytest.approx(0.7225, abs=1e-3)
    half = wilson(5, 10)
    assert (half.low, half.high) == (pytest.approx(0.2366, abs=1e-3), pytest.approx(0.7634, abs=1e-3))


def test_macro_accuracy_and_f1_count_both_classes_alike() -> None:
    """Three of four ambiguous questions right, one of six clear ones wrong: compared with the textbook formulas."""
    pairs = [(True, True)] * 3 + [(False, True)] + [(True, False)] * 5 + [(False, False)]
    accuracy, f1 = macro(pairs, f1=False), macro(pairs, f1=True)
    assert accuracy is not None and f1 is not None
    assert accuracy.mean == pytest.approx((3 / 4 + 5 / 6) / 2)
    ask, clear = 2 * 3 / (2 * 3 + 1 + 1), 2 * 5 / (2 * 5 + 1 + 1)
    assert f1.mean == pytest.approx((ask + clear) / 2) and f1.low < f1.mean < f1.high
    assert macro([(True, True)], f1=True) is None and macro([], f1=False) is None
