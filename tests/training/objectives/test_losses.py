"""Losses as pure functions: KL estimators, clipping, length normalisations, limits of DPO."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from upshot.training.learner.batch import Datum, pack
from upshot.training.learner.forward.padded import token_logprobs
from upshot.training.loops.dpo import preference
from upshot.training.loops.ppo import clipped_value
from upshot.training.objectives.objectives import Denominator, kl_divergence, kl_penalty, normalise

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


def gradient_of_the_mean(estimator: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the divergence, and of the estimator's mean over samples, whose weights are constants."""
    torch.manual_seed(1)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(6, dtype=torch.float64), 0)
    own = torch.log_softmax(logits, 0)
    (true,) = torch.autograd.grad((own.exp() * (own - reference)).sum(), logits, retain_graph=True)
    weights = own.detach().exp()
    mean = (weights * kl_penalty(own, own.detach(), reference, estimator)).sum()
    return true, torch.autograd.grad(mean, logits)[0]


@pytest.mark.parametrize("estimator", ["k2", "k3-corrected"])
def test_these_penalties_have_the_gradient_of_the_divergence(estimator: str) -> None:
    true, found = gradient_of_the_mean(estimator)
    assert torch.allclose(true, found, atol=1e-12)


def test_plain_k3_has_another_gradient_as_the_docs_say() -> None:
    true, found = gradient_of_the_mean("k3")
    assert not torch.allclose(true, found, atol=1e-2)


def test_length_normalisations_match_hand_computed_values() -> None:
    batch = pack([Datum([7] * 4, [0, 1, 1, 1]), Datum([7] * 2, [0, 1])], "cpu")
    loss = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def by(mode: str) -> float:
        return float(normalise(loss, batch, Denominator(mode, sequences=2, tokens=4, max_tokens=5)))

    assert by("sequence") == pytest.approx((2 + 4) / 2)
    assert by("token") == pytest.approx(10 / 4)
    assert by("constant") == pytest.approx(10 / (2 * 5))
    with pytest.raises(ValueError, match="'words'"):
        by("words")


@given(st.floats(-30, 30), st.floats(0.01, 2))
def test_preference_losses_match_hand_computed_values(margin: float, beta: float) -> None:
    one = torch.tensor([margin], dtype=torch.float64)
    assert float(preference(one, beta, "sigmoid")) == pytest.approx(math.log1p(math.exp(-beta * margin)), abs=1e-9)
    assert float(preference(one, beta, "ipo")) == pytest.approx((margin - 1 / (2 * beta)) ** 2)
    assert float(preference(one * 0, beta, "sigmoid")) == pytest.approx(math.log(2)), "the reference is indifferent"
    with pytest.raises(ValueError, match="'hinge'"):
        preference(one, beta, "hinge")


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
