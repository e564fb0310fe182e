"""Losses as pure functions of log-probabilities.

Shapes: B sequences, T positions. `mask_B_T` is 1 on the tokens that are trained. Every token loss is reduced by
`normalise`, whose modes are named in the recipe (`train.length_norm`). Denominators are passed in, so that a step split
into micro-batches gives exactly the gradient of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def token_logprobs(logits_B_T_V: Tensor, ids_B_T: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of every token given those before it; position 0, which nothing precedes, gets 0."""
    logits = logits_B_T_V[:, :-1].float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    picked = -F.cross_entropy(logits.flatten(0, 1), ids_B_T[:, 1:].flatten(), reduction="none")
    return F.pad(picked.view(ids_B_T.shape[0], -1), (1, 0))


@dataclass(frozen=True, slots=True)
class Denominator:
    """What a step's token losses are divided by; counted over the whole step, not the micro-batch."""

    mode: str
    sequences: int
    tokens: int
    max_tokens: int


def normalise(loss_B_T: Tensor, mask_B_T: Tensor, by: Denominator) -> Tensor:
    """Masked token losses → a scalar: 'sequence', 'token' or 'constant' (see the recipe's train.length_norm)."""
    masked = loss_B_T * mask_B_T
    if by.mode == "sequence":
        return (masked.sum(1) / mask_B_T.sum(1).clamp(min=1)).sum() / max(by.sequences, 1)
    if by.mode == "token":
        return masked.sum() / max(by.tokens, 1)
    if by.mode == "constant":
        return masked.sum() / max(by.sequences * by.max_tokens, 1)
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

    loss_B_T: Tensor
    ratio_B_T: Tensor
    clipped_B_T: Tensor


def policy_gradient(
    logprobs_B_T: Tensor, old_B_T: Tensor, advantages_B_T: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> PolicyLoss:
    """The clipped surrogate of PPO and GRPO, per token."""
    ratio = (logprobs_B_T - old_B_T).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages_B_T, clipped * advantages_B_T)
    binding = ((ratio < 1 - clip_low) & (advantages_B_T < 0)) | ((ratio > 1 + clip_high) & (advantages_B_T > 0))
    return PolicyLoss(loss, ratio, binding.float())


def dpo(
    chosen_B: Tensor, rejected_B: Tensor, reference_chosen_B: Tensor, reference_rejected_B: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Direct preference loss per pair (sigmoid form) from summed log-probabilities, and the implicit reward margin."""
    margin = (chosen_B - reference_chosen_B) - (rejected_B - reference_rejected_B)
    return -F.logsigmoid(beta * margin), beta * margin


def clipped_value(values_B_T: Tensor, old_B_T: Tensor, targets_B_T: Tensor, clip: float) -> Tensor:
    """PPO's value loss per token: half the squared error, the larger of the plain and the clipped one."""
    near = old_B_T + (values_B_T - old_B_T).clamp(-clip, clip)
    return 0.5 * torch.maximum((values_B_T - targets_B_T).square(), (near - targets_B_T).square())
