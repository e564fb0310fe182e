"""Group statistics: hand-computed cases, missing values, spans, and what must hold for any rewards."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.errors import UserError
from upshot.rewards.credit import MAIN, Credit, Span, check, credit_sampled, sampled_spans
from upshot.score import Score
from upshot.train.advantages import EPSILON, ESTIMATORS, dr_grpo, estimator, gae, grpo, rloo, span_advantages

rewards = st.lists(st.none() | st.floats(-10, 10), min_size=1, max_size=12)
masks = st.lists(st.integers(0, 1), max_size=40)


def test_a_group_with_a_missing_reward_by_hand() -> None:
    group = [1.0, None, 0.0, 0.5]
    assert dr_grpo(group) == [0.5, None, -0.5, 0.0]
    assert rloo(group) == pytest.approx([0.75, None, -0.75, 0.0])
    assert grpo(group) == pytest.approx([0.5 / (0.5 + EPSILON), None, -0.5 / (0.5 + EPSILON), 0.0])


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("group", [[2.0], [None, 3.0], [None, None]])
def test_fewer_than_two_rewards_say_nothing(name: str, group: list[float | None]) -> None:
    assert estimator(name)(group) == [None if value is None else 0.0 for value in group]


def test_an_unknown_estimator_is_named_with_its_neighbour() -> None:
    with pytest.raises(UserError, match="did you mean 'rloo'"):
        estimator("rlo")


@given(rewards)
def test_missing_stays_missing_and_leaves_the_statistics(group: list[float | None]) -> None:
    present = [value for value in group if value is not None]
    for estimate in ESTIMATORS.values():
        found = estimate(group)
        assert [value is None for value in found] == [value is None for value in group]
        alone = iter(estimate(present))
        assert [value for value in found if value is not None] == pytest.approx(list(alone))


@given(rewards, st.floats(-5, 5))
def test_advantages_add_up_to_zero_and_ignore_a_shift(group: list[float | None], shift: float) -> None:
    moved = [None if value is None else value + shift for value in group]
    for estimate in ESTIMATORS.values():
        found = estimate(group)
        assert math.fsum(value or 0.0 for value in found) == pytest.approx(0, abs=1e-6)
        for one, other in zip(found, estimate(moved), strict=True):
            assert one is other is None or one == pytest.approx(other, abs=1e-6)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_leave_one_out_is_centring_scaled(group: list[float]) -> None:
    scale = len(group) / (len(group) - 1)
    assert rloo(group) == pytest.approx([scale * (value or 0.0) for value in dr_grpo(group)], abs=1e-9)


def test_grpo_is_what_trl_computes() -> None:
    import torch

    values = torch.tensor([0.2, 1.7, -0.3, 0.9])
    expected = (values - values.mean()) / (values.std() + 1e-4)  # GRPOTrainer: scale_rewards="group"
    assert grpo(values.tolist()) == pytest.approx(expected.tolist(), abs=1e-6)


def test_classmate_spans_by_hand() -> None:
    """The fixture of the published method, without division by the deviation."""
    main, classmate = (8.0, 4.0, 6.0, 2.0), (2.0, 6.0, 6.0, 2.0)
    both = (MAIN, "classmate")
    spans = (Span(0, 2), Span(2, 5, both), Span(5, 7))
    group = [Credit({MAIN: Score(m), "classmate": Score(c)}, spans) for m, c in zip(main, classmate, strict=True)]
    found = span_advantages(group, dr_grpo)
    assert [own[1] for own in found] == [1, 1, 3, -5], "thought tokens compete by main + classmate"
    assert [own[0] for own in found] == [own[2] for own in found] == [3, -1, 1, -3], "all others by main alone"


def test_a_missing_part_leaves_only_the_spans_that_need_it() -> None:
    both = (MAIN, "classmate")
    spans = (Span(0, 2, both), Span(2, 4))
    parts = [(8.0, 2.0), (4.0, None), (6.0, 6.0)]
    group = [
        Credit({MAIN: Score(m), "classmate": Score.missing("timeout") if c is None else Score(c)}, spans)
        for m, c in parts
    ]
    found = span_advantages([*group, None], dr_grpo)
    assert [own[0] for own in found[:3]] == [-1.0, None, 1.0], "10 and 12 remain"
    assert [own[1] for own in found[:3]] == [2.0, -2.0, 0.0]
    assert found[3] == []


@given(masks, st.floats(-5, 5))
def test_spans_cover_every_sampled_token_once(mask: list[int], value: float) -> None:
    credit = credit_sampled(Score(value), mask)
    check(credit, mask)
    assert all(0 <= span.start < span.stop <= len(mask) for span in credit.spans)
    assert sampled_spans(mask) == credit.spans


@given(masks.filter(any))
def test_a_span_too_few_or_too_many_is_refused(mask: list[int]) -> None:
    spans = sampled_spans(mask)
    for wrong in (spans[1:], (*spans, spans[0])):
        with pytest.raises(ValueError, match="every sampled token once"):
            check(Credit({MAIN: Score(0.0)}, wrong), mask)


def test_gae_by_hand() -> None:
    rewards, values = [0.0, 0.0, 1.0], [0.5, 0.4, 0.2]
    # deltas: -0.1, -0.2, 0.8; decay 0.9 x 0.5
    advantages, targets = gae(rewards, values, gamma=0.9, lam=0.5)
    deltas = [0.9 * 0.4 - 0.5, 0.9 * 0.2 - 0.4, 0.8]
    expected = [deltas[0] + 0.45 * (deltas[1] + 0.45 * deltas[2]), deltas[1] + 0.45 * deltas[2], deltas[2]]
    assert advantages == pytest.approx(expected)
    assert targets == pytest.approx([a + v for a, v in zip(expected, values, strict=True)])


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=20))
def test_gae_at_its_ends_is_the_return_and_the_td_error(steps: list[tuple[float, float]]) -> None:
    rewards, values = [list(column) for column in zip(*steps, strict=True)]
    _, targets = gae(rewards, values, gamma=1.0, lam=1.0)
    assert targets == pytest.approx([math.fsum(rewards[t:]) for t in range(len(rewards))], abs=1e-6)
    advantages, _ = gae(rewards, values, gamma=1.0, lam=0.0)
    after = [*values[1:], 0.0]
    assert advantages == pytest.approx([r + n - v for r, n, v in zip(rewards, after, values, strict=True)], abs=1e-9)
