"""Losses as pure functions of log-probabilities.

Shapes: M trained tokens of S sequences, one after the other. Every token loss is reduced by `normalise`, whose modes
are named in the recipe (`train.length_norm`). Denominators are passed in, so that a step split into micro-batches gives
exactly the gradient of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from upshot.training.learner.batch import TrainBatch


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
    """Of those that are counted."""
    tokens: int
    """Of those that are counted."""
    max_tokens: int


def normalise(loss_M: Tensor, batch: TrainBatch, by: Denominator) -> Tensor:
    """Token losses → a scalar: 'sequence', 'token' or 'constant' (see the recipe's train.length_norm)."""
    if batch.share is not None:
        loss_M = loss_M * batch.share[batch.owner]
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
    if estimator in ("k3", "k3-corrected"):
        return (ratio.expm1() - ratio).clamp(min=0)  # never below zero by rounding
    raise ValueError(f"unknown KL estimator '{estimator}'")


def kl_penalty(logprobs: Tensor, old: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """The divergence as a loss per token.

    In the mean over samples of the policy, k2 and k3-corrected have the divergence's own gradient. k3, GRPO's usual
    one, has that of the reversed divergence: it leaves out that a likelier token is also seen more often, which the
    ratio to the sampling policy in k3-corrected puts back.
    """
    divergence = kl_divergence(logprobs, reference, estimator)
    return (logprobs - old).exp() * divergence if estimator == "k3-corrected" else divergence


def preference(margin_P: Tensor, beta: float, kind: str) -> Tensor:
    """Loss per pair from how much more the chosen reply gained on the reference than the rejected one.

    sigmoid (DPO): margins of summed log-probabilities. ipo: margins of their means over a reply's tokens, drawn towards
    1 / (2 beta) instead of without end.
    """
    if kind == "sigmoid":
        return -F.logsigmoid(beta * margin_P)
    if kind == "ipo":
        return (margin_P - 1 / (2 * beta)).square()
    raise ValueError(f"unknown preference loss '{kind}'")


def clipped_value(values_M: Tensor, old_M: Tensor, targets_M: Tensor, clip: float) -> Tensor:
    """PPO's value loss per token: half the squared error, the larger of the plain and the clipped one."""
    near = old_M + (values_M - old_M).clamp(-clip, clip)
    return 0.5 * torch.maximum((values_M - targets_M).square(), (near - targets_M).square())
