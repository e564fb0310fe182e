"""The clipped surrogate of PPO and GRPO, and its kin with the ratio of whole sequences (GSPO)."""

from __future__ import annotations

import torch
from torch import Tensor

from upshot.config.recipe import TrainConfig
from upshot.training.learner.batch import TrainBatch
from upshot.training.objectives.objectives import PolicyLoss, surrogates


@surrogates.register("clipped")
def clipped(batch: TrainBatch, logprobs_M: Tensor, config: TrainConfig) -> PolicyLoss:
    """The smaller of ratio x advantage and clipped ratio x advantage, per token (PPO, GRPO, DAPO)."""
    return pessimistic((logprobs_M - batch.columns["old"]).exp(), batch, config)


@surrogates.register("gspo")
def gspo(batch: TrainBatch, logprobs_M: Tensor, config: TrainConfig) -> PolicyLoss:
    """The clipped loss with one ratio per sequence, the geometric mean of its tokens' (GSPO). Clip at about 3e-4.

    It is GSPO-token: the ratio is the sequence's, its gradient the token's own. Where all tokens of a sequence have one
    advantage that is GSPO's gradient; where spans have different ones, each token is pushed by its own and not by their
    mean.
    """
    difference = logprobs_M - batch.columns["old"]
    means = batch.sums(difference.detach()) / batch.counts().clamp(min=1)
    gradient_only = logprobs_M - logprobs_M.detach()  # 0, with the token's gradient
    return pessimistic((means[batch.owner] + gradient_only).exp(), batch, config)


def pessimistic(ratio_M: Tensor, batch: TrainBatch, config: TrainConfig) -> PolicyLoss:
    """The clipped surrogate of given ratios."""
    advantages = batch.columns["advantages"]
    low, high = 1 - config.clip.low, 1 + config.clip.high
    loss = -torch.minimum(ratio_M * advantages, ratio_M.clamp(low, high) * advantages)
    binding = ((ratio_M < low) & (advantages < 0)) | ((ratio_M > high) & (advantages > 0))
    return PolicyLoss(loss, ratio_M, binding.float())
