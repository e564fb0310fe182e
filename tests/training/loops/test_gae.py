"""Generalised advantage estimation: hand-computed values, and its two limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshot.training.loops.ppo import gae


def test_gae_matches_hand_computed_values() -> None:
    rewards, values = [0.0, 0.0, 1.0], [0.5, 0.4, 0.2]
    # deltas: -0.1, -0.2, 0.8; decay 0.9 x 0.5
    advantages, targets = gae(rewards, values, gamma=0.9, lam=0.5)
    deltas = [0.9 * 0.4 - 0.5, 0.9 * 0.2 - 0.4, 0.8]
    expected = [deltas[0] + 0.45 * (deltas[1] + 0.45 * deltas[2]), deltas[1] + 0.45 * deltas[2], deltas[2]]
    assert advantages == pytest.approx(expected)
    assert targets == pytest.approx([a + v for a, v in zip(expected, values, strict=True)])


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=20))
def test_gae_in_its_limits_is_the_return_or_the_td_error(steps: list[tuple[float, float]]) -> None:
    rewards, values = [list(column) for column in zip(*steps, strict=True)]
    _, targets = gae(rewards, values, gamma=1.0, lam=1.0)
    assert targets == pytest.approx([math.fsum(rewards[t:]) for t in range(len(rewards))], abs=1e-6)
    advantages, _ = gae(rewards, values, gamma=1.0, lam=0.0)
    after = [*values[1:], 0.0]
    assert advantages == pytest.approx([r + n - v for r, n, v in zip(rewards, after, values, strict=True)], abs=1e-9)
