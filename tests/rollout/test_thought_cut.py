"""How much of a thought is handed to a classmate."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.core.errors import UserError
from upshot.rollout.futures.classmates.thought_cut import ThoughtCut

SPECS = [1, 0.5, 0.01, "first-3-tokens", "last-3-tokens", [0.2, 0.8]]


@pytest.mark.parametrize(
    ("spec", "length", "expected"),
    [
        (1, 10, (0, 10)),
        (0.5, 10, (0, 5)),
        (0.5, 5, (0, 2)),
        (0.01, 5, (0, 1)),
        ("first-3-tokens", 10, (0, 3)),
        ("first-3-tokens", 2, (0, 2)),
        ("last-3-tokens", 10, (7, 10)),
        ("last-3-tokens", 2, (0, 2)),
    ],
)
def test_the_kept_tokens_match_hand_computed_cases(spec: object, length: int, expected: tuple[int, int]) -> None:
    assert ThoughtCut.parse(spec).span(0, length, random.Random(0)) == expected


@given(st.sampled_from(SPECS), st.integers(0, 50), st.integers(0, 50), st.integers())
def test_the_kept_part_is_within_the_thought_and_empty_only_if_it_is(
    spec: object, start: int, length: int, seed: int
) -> None:
    low, high = ThoughtCut.parse(spec).span(start, start + length, random.Random(seed))
    assert start <= low <= high <= start + length
    assert (low == high) == (length == 0)
    again = ThoughtCut.parse(spec).span(start, start + length, random.Random(seed))
    assert (low, high) == again, "one seed, one cut"


def test_a_value_of_a_range_is_drawn_for_each_reply() -> None:
    keep = ThoughtCut.parse([0.2, 0.8])
    stops = {keep.span(0, 100, random.Random(seed))[1] for seed in range(50)}
    assert len(stops) > 20 and min(stops) >= 20 and max(stops) <= 80


@pytest.mark.parametrize(
    "spec",
    [
        0,
        -1,
        1.5,
        True,
        "first-0-tokens",
        "first-tokens",
        [0.8, 0.2],
        [0, 1],
        [0.2, "a"],
        [[], 1],
        float("nan"),
        None,
        "all",
    ],
)
def test_a_wrong_cut_is_named_with_what_is_valid(spec: object) -> None:
    with pytest.raises(ValueError, match="give a share above 0"):
        ThoughtCut.parse(spec)


def test_a_wrong_cut_in_a_recipe_is_refused_before_any_work() -> None:
    from upshot.config.load import load_recipe
    from upshot.rollout.check_names import check_names

    check_names(load_recipe("classmate-mini", ["futures.keep=last-8-tokens"]).recipe)
    with pytest.raises(UserError, match=r"in futures: keep = 2: give a share above 0"):
        check_names(load_recipe("classmate-mini", ["futures.keep=2"]).recipe)
