"""Score-function surrogates: the log-probability itself, weighted by a ratio that takes no part in the gradient."""

from __future__ import annotations

from torch import Tensor

from upshot.config.recipe import TrainConfig
from upshot.training.learner.batch import TrainBatch
from upshot.training.objectives.objectives import PolicyLoss, surrogates


@surrogates.register("cispo")
def cispo(batch: TrainBatch, logprobs_M: Tensor, config: TrainConfig) -> PolicyLoss:
    """Log-probability x advantage x ratio capped at 1 + clip_high (CISPO): no token's gradient is dropped."""
    ratio = (logprobs_M - batch.columns["old"]).exp()
    weight = ratio.detach().clamp(max=1 + config.clip.high)
    advantages = batch.columns["advantages"]
    capped = (ratio > 1 + config.clip.high) & (advantages > 0)
    return PolicyLoss(-weight * advantages * logprobs_M, ratio, capped.float())


@surrogates.register("reinforce")
def reinforce(batch: TrainBatch, logprobs_M: Tensor, config: TrainConfig) -> PolicyLoss:
    """Log-probability x advantage: plain REINFORCE, for strictly on-policy steps."""
    ratio = (logprobs_M - batch.columns["old"]).exp()
    return PolicyLoss(-batch.columns["advantages"] * logprobs_M, ratio, ratio.detach() * 0)
