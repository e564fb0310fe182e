"""What the learner minimises: losses as pure functions of log-probabilities, and one small class per training method.

Shapes: M trained tokens of S sequences, one after the other. Every token loss is reduced by `normalise`, whose modes
are named in the recipe (`train.length_norm`). Denominators are passed in, so that a step split into micro-batches gives
exactly the gradient of the whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from upshot.config.recipe import ImportanceConfig, TrainConfig
from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch
from upshot.training.learner.distributed.ranks import ALONE, Ranks
from upshot.training.objectives.mismatch import MismatchMeter
from upshot.training.objectives.surrogates.base import check_shape, surrogate

Logs = dict[str, Tensor]
"""Scalars where they were computed: to read one at once would wait for the GPU in every micro-batch."""


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


class Objective(ABC):
    """A loss over a step's data, computed micro-batch by micro-batch.

    `begin` sees all data of the step, so that denominators are those of the step. The losses and logged values of the
    micro-batches add up to those of the step.
    """

    needs_values = False
    """Whether the learner should pass the value head's output."""
    needs_entropy = False
    """Whether it should pass the entropy of each token's distribution."""
    dropout = False
    """Whether dropout is on. Off wherever log-probabilities are compared with those of the sampler or the reference:
    its noise would look like a change of the policy."""

    def begin(self, data: Sequence[Datum], max_tokens: int, mode: str) -> None:
        """Count the step's sequences and tokens."""
        counted = [len(datum.places) for datum in data if datum.counted]
        self.by = Denominator(mode, len(counted), sum(counted), max_tokens)
        self.tokens = sum(len(datum.places) for datum in data)

    @abstractmethod
    def loss(self, batch: TrainBatch, output: ForwardOutput) -> tuple[Tensor, Logs]:
        """This micro-batch's share of the loss and of the logged values."""

    def weight(self, name: str) -> float:
        """How many of the data a value that is logged under this name is a mean over: sequences or trained tokens."""
        if not name.startswith("loss/"):
            return max(self.tokens, 1)
        return max(self.by.tokens if self.by.mode == "token" else self.by.sequences, 1)

    def drift(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """How far the learner was from the sampler, to be logged; nothing where nothing was sampled."""
        return {}

    def share(self, per_token: Tensor) -> Tensor:
        """This micro-batch's share of a mean over the step's trained tokens."""
        return per_token.detach().sum() / max(self.tokens, 1)


class Sft(Objective):
    """Cross-entropy on the masked tokens."""

    dropout = True

    def loss(self, batch: TrainBatch, output: ForwardOutput) -> tuple[Tensor, Logs]:
        """Mean negative log-likelihood."""
        loss = normalise(-output.logprobs, batch, self.by)
        return loss, {"loss/nll": loss.detach()}


class PolicyGradient(Objective):
    """The surrogate that the recipe names, with an optional KL penalty to the initial model and an entropy bonus."""

    def __init__(self, config: TrainConfig, importance: ImportanceConfig | None = None) -> None:
        """`importance`: how tokens are weighed in passing."""
        self.config = config
        self.surrogate = surrogate(config.loss.name, config.loss.options)
        self.needs_entropy = bool(config.entropy)
        self.mismatch = MismatchMeter(importance)

    def drift(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """See `Objective`."""
        return self.mismatch.drift(ranks)

    def loss(self, batch: TrainBatch, output: ForwardOutput) -> tuple[Tensor, Logs]:
        """Surrogate x importance + kl x divergence - entropy bonus."""
        batch = self.mismatch.watch(batch, output.logprobs.detach())
        config, columns, logprobs = self.config, batch.columns, output.logprobs
        pg = self.surrogate(batch, logprobs, config)
        check_shape(pg, logprobs, config.loss.name)
        # Where tokens are weighed, the surrogate's ratio is to the learner before the step, not to the sampler.
        ratio = (logprobs - columns["sampled"]).exp() if "sampled" in columns else pg.ratio_M
        entropy = -logprobs if output.entropy is None else output.entropy
        per_token = pg.loss_M * columns["weights"] if "weights" in columns else pg.loss_M
        logs = {
            "policy/ratio": self.share(ratio),
            "policy/clipped": self.share(pg.clipped_M),
            "policy/kl_to_sampler": self.share(kl_divergence(columns.get("sampled", columns["old"]), logprobs, "k3")),
            "policy/entropy": self.share(entropy),
        }
        if config.kl.weight and config.kl.where == "loss" and "reference" in columns:
            penalty = kl_penalty(logprobs, columns["old"], columns["reference"], config.kl.estimator)
            per_token = per_token + config.kl.weight * penalty
            logs["policy/kl_to_reference"] = self.share(penalty)
        if config.entropy:
            per_token = per_token - config.entropy * entropy
        loss = normalise(per_token, batch, self.by)
        logs["loss/policy"] = loss.detach()
        return loss, logs


class Ppo(PolicyGradient):
    """The clipped surrogate and the value head's loss."""

    needs_values = True

    def loss(self, batch: TrainBatch, output: ForwardOutput) -> tuple[Tensor, Logs]:
        """Policy loss + value_weight × value loss."""
        loss, logs = super().loss(batch, output)
        if output.values is None:
            raise ValueError("ppo needs the value head's output")
        columns = batch.columns
        errors = clipped_value(output.values, columns["values"], columns["returns"], self.config.clip.high)
        value_loss = normalise(errors, batch, self.by)
        logs["loss/value"] = value_loss.detach()
        return loss + self.config.ppo.value_weight * value_loss, logs


class Dpo(Objective):
    """Direct preference optimisation over pairs: chosen and rejected stand next to each other in the batch."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def weight(self, name: str) -> float:
        """All that is logged are means over pairs."""
        return max(self.by.sequences // 2, 1)

    def loss(self, batch: TrainBatch, output: ForwardOutput) -> tuple[Tensor, Logs]:
        """Mean over pairs of the preference loss."""
        policy, reference = batch.sums(output.logprobs), batch.sums(batch.columns["reference"])
        gained = policy - reference
        if self.config.dpo.loss == "ipo":
            gained = gained / batch.counts().clamp(min=1)
        margin = gained[::2] - gained[1::2]
        pairs = max(self.by.sequences // 2, 1)
        loss = preference(margin, self.config.dpo.beta, self.config.dpo.loss).sum() / pairs
        return loss, {
            "loss/dpo": loss.detach(),
            "dpo/accuracy": (margin.detach() > 0).float().sum() / pairs,
            "dpo/margin": self.config.dpo.beta * margin.detach().sum() / pairs,
        }
