"""Losses as pure functions: KL estimators, clipping, length normalisations, DPO's limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from upshot.train.batch import Datum, pack
from upshot.train.losses import (
    Denominator,
    clipped_value,
    dpo,
    kl_divergence,
    normalise,
    policy_gradient,
    token_logprobs,
)

finite = st.floats(-4, 4)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_mean_of_an_estimator_is_the_divergence(estimator: str) -> None:
    torch.manual_seed(0)
    own = torch.log_softmax(0.3 * torch.randn(6), 0)
    reference = torch.log_softmax(own + 0.1 * torch.randn(6), 0)
    exact = float((own.exp() * (own - reference)).sum())
    mean = float((own.exp() * kl_divergence(own, reference, estimator)).sum())  # the expectation, without sampling
    tolerance = 1e-6 if estimator != "k2" else 0.05 * exact  # k2 is biased, of third order
    assert mean == pytest.approx(exact, abs=tolerance)


@given(finite, finite)
def test_k2_and_k3_are_never_negative_and_zero_only_without_a_difference(own: float, reference: float) -> None:
    for estimator in ("k2", "k3"):
        pair = torch.tensor([own, reference], dtype=torch.float64)
        value = float(kl_divergence(pair[0], pair[1], estimator))
        assert value >= 0
        assert float(kl_divergence(torch.tensor(own), torch.tensor(own), estimator)) == 0


@given(finite, finite, finite)
def test_the_clipped_surrogate_is_the_pessimistic_one(own: float, old: float, advantage: float) -> None:
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (own, old, advantage)]
    found = policy_gradient(*tensors, clip_low=0.2, clip_high=0.3)
    ratio = math.exp(own - old)
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
    assert float(found.loss_M) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    binding = (ratio < 0.8 and advantage < 0) or (ratio > 1.3 and advantage > 0)
    assert bool(found.clipped_M) == binding


def test_length_normalisations_by_hand() -> None:
    batch = pack([Datum([7] * 4, [0, 1, 1, 1]), Datum([7] * 2, [0, 1])], "cpu")
    loss = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def by(mode: str) -> float:
        return float(normalise(loss, batch, Denominator(mode, sequences=2, tokens=4, max_tokens=5)))

    assert by("sequence") == pytest.approx((2 + 4) / 2)
    assert by("token") == pytest.approx(10 / 4)
    assert by("constant") == pytest.approx(10 / (2 * 5))
    with pytest.raises(ValueError, match="'words'"):
        by("words")


@given(st.lists(st.tuples(finite, finite, finite, finite), min_size=1, max_size=5), st.floats(0.01, 2))
def test_dpo_prefers_what_gained_on_the_reference(rows: list[tuple[float, ...]], beta: float) -> None:
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]
    loss, margin = dpo(*columns, beta)
    for (chosen, rejected, chosen_ref, rejected_ref), own, m in zip(rows, loss.tolist(), margin.tolist(), strict=True):
        expected = beta * ((chosen - chosen_ref) - (rejected - rejected_ref))
        assert m == pytest.approx(expected, abs=1e-9)
        assert own == pytest.approx(math.log1p(math.exp(-expected)), abs=1e-9)
    same, _ = dpo(columns[0], columns[1], columns[0], columns[1], beta)
    assert same.tolist() == pytest.approx([math.log(2)] * len(rows)), "the reference itself is indifferent"


def test_the_value_loss_takes_the_larger_error() -> None:
    values, old, targets = (torch.tensor([x]) for x in (1.0, 0.0, 1.0))
    assert float(clipped_value(values, old, targets, clip=0.2)) == pytest.approx(0.5 * 0.8**2)
    assert float(clipped_value(values, old, targets, clip=2.0)) == 0


def test_log_probabilities_are_of_the_tempered_softmax_and_shifted_by_one() -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    found = token_logprobs(logits, ids, temperature=0.7)
    assert found[:, 0].tolist() == [0, 0], "nothing precedes the first token"
    expected = torch.log_softmax(logits / 0.7, -1)
    for b in range(2):
        for t in range(1, 5):
            assert float(found[b, t]) == pytest.approx(float(expected[b, t - 1, ids[b, t]]), abs=1e-5)
