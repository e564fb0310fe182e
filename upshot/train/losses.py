"""Losses as pure functions of log-probabilities.

Shapes: M trained tokens of S sequences, one after the other. Every token loss is reduced by `normalise`: its modes are
named in the recipe (`train.length_norm`). Denominators are passed in, so that a step split into micro-batches gives
exactly the gradient of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from upshot.train.batch import Batch


def token_logprobs(logits_B_T_V: Tensor, ids_B_T: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of every token given those before it; position 0, which nothing precedes, gets 0."""
    logits = logits_B_T_V[:, :-1].float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    picked = -F.cross_entropy(logits.flatten(0, 1), ids_B_T[:, 1:].flatten(), reduction="none")
    return F.pad(picked.view(ids_B_T.shape[0], -1), (1, 0))


def entropies(logits_M_V: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of softmax(logits / temperature), one a row."""
    logits = logits_M_V.float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


@dataclass(frozen=True, slots=True)
class Denominator:
    """What a step's token losses are divided by; counted over the whole step, not the micro-batch."""

    mode: str
    sequences: int
    tokens: int
    max_tokens: int


def normalise(loss_M: Tensor, batch: Batch, by: Denominator) -> Tensor:
    """Token losses → a scalar: 'sequence', 'token' or 'constant' (see the recipe's train.length_norm)."""
    if by.mode == "sequence":
        return (batch.sums(loss_M) / batch.counts().clamp(min=1)).sum() / max(by.sequences, 1)
    if by.mode == "token":
        return loss_M.sum() / max(by.tokens, 1)
    if by.mode == "constant":
        return loss_M.sum() / max(by.sequences * by.max_tokens, 1)
    raise ValueError(f"unknown length normalisation '{by.mode}'")


def kl_divergence(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) from samples of the policy."""
    ratio = reference - logprobs
    if estimator == "k2":
        return 0.5 * ratio.square()
    if estimator == "k3":
        return (ratio.expm1() - ratio).clamp(min=0)  # never below zero by rounding
    raise ValueError(f"unknown KL estimator '{estimator}'")


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Token losses of the clipped policy gradient, and what to log."""

    loss_M: Tensor
    ratio_M: Tensor
    clipped_M: Tensor


def policy_gradient(
    logprobs_M: Tensor, old_M: Tensor, advantages_M: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> PolicyLoss:
    """The clipped surrogate of PPO and GRPO, per token."""
    ratio = (logprobs_M - old_M).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages_M, clipped * advantages_M)
    binding = ((ratio < 1 - clip_low) & (advantages_M < 0)) | ((ratio > 1 + clip_high) & (advantages_M > 0))
    return PolicyLoss(loss, ratio, binding.float())


def dpo(
    chosen_S: Tensor, rejected_S: Tensor, reference_chosen_S: Tensor, reference_rejected_S: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Direct preference loss per pair (sigmoid form) from summed log-probabilities, and the implicit reward margin."""
    margin = (chosen_S - reference_chosen_S) - (rejected_S - reference_rejected_S)
    return -F.logsigmoid(beta * margin), beta * margin


def clipped_value(values_M: Tensor, old_M: Tensor, targets_M: Tensor, clip: float) -> Tensor:
    """PPO's value loss per token: half the squared error, the larger of the plain and the clipped one."""
    near = old_M + (values_M - old_M).clamp(-clip, clip)
    return 0.5 * torch.maximum((values_M - targets_M).square(), (near - targets_M).square())
