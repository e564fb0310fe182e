"""Surrogates as pure functions: what is clipped, what is capped, what reaches the gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.training.workshop import datum, learner
from upshot.config.recipe import TrainConfig
from upshot.config.registry import path_of
from upshot.core.conversation import Conversation, Row
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.rewards.advantages.grouped import estimator
from upshot.rewards.build import build_metric
from upshot.rewards.credit import Credit, Span
from upshot.rollout.reply import Rollout
from upshot.training.learner.batch import Datum, TrainBatch, pack
from upshot.training.loops.rl import set_advantages
from upshot.training.objectives.objectives import PolicyGradient, PolicyLoss, surrogate, surrogates

finite = st.floats(-4, 4)
CONFIG = TrainConfig(clip={"low": 0.2, "high": 0.3})


def batch(*sequences: list[tuple[float, float]]) -> TrainBatch:
    """Sequences of (old, advantage) of the trained tokens."""
    return pack(
        [
            Datum([7] * (len(s) + 1), [0, *[1] * len(s)], [0.0, *(o for o, _ in s)], [0.0, *(a for _, a in s)])
            for s in sequences
        ],
        "cpu",
    )


@given(finite, finite, finite)
def test_the_clipped_surrogate_is_the_pessimistic_one(own: float, old: float, advantage: float) -> None:
    found = surrogate("clipped")(batch([(old, advantage)]), torch.tensor([own]), CONFIG)
    ratio = math.exp(own - old)
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
    assert float(found.loss_M) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_gspo_has_one_ratio_a_sequence() -> None:
    two = batch([(-1.0, 1.0), (-3.0, 1.0)], [(-2.0, -1.0)])
    found = surrogate("gspo")(two, torch.tensor([-0.8, -3.4, -2.1]), CONFIG)
    assert found.ratio_M.tolist() == pytest.approx([math.exp(-0.1), math.exp(-0.1), math.exp(-0.1)])


def gradient(name: str, sequences: list[list[tuple[float, float]]], own: list[float]) -> list[float]:
    """The gradient of the mean over sequences of the means over their tokens."""
    given = batch(*sequences)
    logprobs = torch.tensor(own, requires_grad=True)
    loss = surrogate(name)(given, logprobs, CONFIG).loss_M
    (given.sums(loss) / given.counts()).mean().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return logprobs.grad.tolist()  # type: ignore[no-any-return]


def test_gspo_pushes_each_span_by_its_own_advantage() -> None:
    """A thought that earned +1 and an answer that earned -1 are pushed differently."""
    reply = [(-1.0, 1.0), (-2.0, 1.0), (-1.0, -1.0), (-2.0, -1.0)]
    assert gradient("gspo", [reply], [-1.0, -2.0, -1.0, -2.0]) == pytest.approx([-0.25, -0.25, 0.25, 0.25])


@given(st.lists(st.tuples(st.lists(st.tuples(finite, st.floats(-1, 1)), min_size=1, max_size=4), finite), min_size=1))
def test_with_one_advantage_a_sequence_it_is_gspo_as_published(
    replies: list[tuple[list[tuple[float, float]], float]],
) -> None:
    """Compared with the gradient of min(s A, clip(s) A), s the ratio of a whole sequence to the power 1 / its
    length."""
    logprobs = torch.tensor([old + more for tokens, _ in replies for old, more in tokens], requires_grad=True)
    losses = []
    for (tokens, advantage), some in zip(replies, logprobs.split([len(x) for x, _ in replies]), strict=True):
        s = (some - torch.tensor([old for old, _ in tokens])).mean().exp()
        assume(min(abs(float(s) - 0.8), abs(float(s) - 1.3)) > 1e-4)  # where the clip begins there is no one gradient
        losses.append(-torch.minimum(s * advantage, s.clamp(0.8, 1.3) * advantage))
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    found = gradient("gspo", [[(old, a) for old, _ in tokens] for tokens, a in replies], logprobs.tolist())
    assert found == pytest.approx(logprobs.grad.tolist(), rel=1e-3, abs=1e-5)


@given(finite, finite, finite)
def test_cispo_drops_no_tokens_gradient(own: float, old: float, advantage: float) -> None:
    logprobs = torch.tensor([own], requires_grad=True)
    surrogate("cispo")(batch([(old, advantage)]), logprobs, CONFIG).loss_M.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(-min(math.exp(own - old), 1.3) * advantage, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", surrogates.names())
def test_on_policy_all_have_the_same_gradient(name: str) -> None:
    old = torch.tensor([-1.0, -2.0, -0.5])
    logprobs = old.clone().requires_grad_()
    given = batch([(-1.0, 0.5), (-2.0, 0.5)], [(-0.5, -1.0)])
    surrogate(name)(given, logprobs, CONFIG).loss_M.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-0.5, -0.5, 1.0])


def halved(batch: TrainBatch, logprobs_M: torch.Tensor, config: TrainConfig, strength: float = 0.5) -> PolicyLoss:
    """A user's surrogate."""
    return PolicyLoss(-strength * logprobs_M, logprobs_M.exp(), logprobs_M * 0)


def test_a_users_surrogate_is_named_by_its_path_with_its_options() -> None:
    own = surrogate("tests.training.objectives.test_surrogates:halved", {"strength": 0.25})
    assert own(batch([(0.0, 1.0)]), torch.tensor([-2.0]), CONFIG).loss_M.tolist() == [0.5]
    with pytest.raises(UserError, match="strenght"):
        surrogate("tests.training.objectives.test_surrogates:halved", {"strenght": 1})


def test_a_loss_of_the_users_own_has_one_number_a_token() -> None:
    def mean(batch: TrainBatch, logprobs_M: torch.Tensor, config: TrainConfig) -> PolicyLoss:
        return PolicyLoss(-logprobs_M.mean(), logprobs_M, logprobs_M)

    teacher = learner(loss=path_of(mean))
    with pytest.raises(UserError, match=r"train\.loss 'here:mean.*its loss_M has the shape \(\) instead of \(4,\)"):
        teacher.forward_backward([[datum(7, 0)]], PolicyGradient(teacher.config))


def test_a_loss_of_the_users_own_may_name_its_arguments_as_it_likes() -> None:
    def renamed(b: TrainBatch, lp: torch.Tensor, c: TrainConfig, strength: float = 1.0) -> PolicyLoss:
        return PolicyLoss(-strength * lp, lp, lp)

    own = surrogate(path_of(renamed), {"strength": 3})
    assert own(batch([(0.0, 1.0)]), torch.tensor([-2.0]), CONFIG).loss_M.tolist() == [6.0]
    with pytest.raises(UserError, match=r"is called with \(batch, logprobs_M, config\), but takes \(batch\)"):
        surrogate(path_of(lambda batch: None))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda lp: 0.0, r"it returned 0\.0 \(float\)"),
        (lambda lp: PolicyLoss(0.0, lp, lp), r"its loss_M is 0\.0 \(float\), not a tensor"),
        (lambda lp: PolicyLoss(lp.detach(), lp, lp), "loss_M has no gradient"),
    ],
)
def test_a_loss_that_cannot_be_learned_from_is_refused_with_what_it_returned(returned: Any, message: str) -> None:
    own = path_of(lambda batch, logprobs_M, config: returned(logprobs_M))
    with pytest.raises(UserError, match=message):
        surrogate(own)(batch([(0.0, 1.0)]), torch.tensor([-2.0], requires_grad=True), CONFIG)


def test_an_estimator_of_the_users_own_has_one_number_a_span() -> None:
    replies = [Rollout(Conversation(Row("a", ())), credit=Credit({"main": Score(1.0)}, (Span(0, 1),))) for _ in "ab"]
    for wrong in ([[0.5, -0.5]], [[[0.5]]], [0.5], None):
        wrong_shape = estimator(path_of(lambda step, wrong=wrong: wrong))
        with pytest.raises(UserError, match=r"should return one number \(or None\) per span"):
            set_advantages([replies], wrong_shape)


def test_a_metric_of_the_wrong_kind_is_refused_by_name() -> None:
    class Polite:
        async def score(self, conversation: Conversation) -> float:
            return 1.0

    with pytest.raises(UserError, match=r"metric 'here:Polite.*derive it from upshot\.Metric"):
        build_metric(path_of(Polite))
