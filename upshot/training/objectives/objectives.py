"""What the learner minimises: one small class per training method, on top of the pure losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from upshot.config.recipe import ImportanceConfig, TrainConfig
from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch
from upshot.training.learner.distributed.ranks import ALONE, Ranks
from upshot.training.objectives import losses
from upshot.training.objectives.mismatch import MismatchMeter
from upshot.training.objectives.surrogates.base import check_shape, surrogate

Logs = dict[str, Tensor]
"""Scalars where they were computed: to read one at once would wait for the GPU in every micro-batch."""


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
        self.by = losses.Denominator(mode, len(counted), sum(counted), max_tokens)
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
        loss = losses.normalise(-output.logprobs, batch, self.by)
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
            "policy/kl_to_sampler": self.share(
                losses.kl_divergence(columns.get("sampled", columns["old"]), logprobs, "k3")
            ),
            "policy/entropy": self.share(entropy),
        }
        if config.kl.weight and config.kl.where == "loss" and "reference" in columns:
            penalty = losses.kl_penalty(logprobs, columns["old"], columns["reference"], config.kl.estimator)
            per_token = per_token + config.kl.weight * penalty
            logs["policy/kl_to_reference"] = self.share(penalty)
        if config.entropy:
            per_token = per_token - config.entropy * entropy
        loss = losses.normalise(per_token, batch, self.by)
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
        errors = losses.clipped_value(output.values, columns["values"], columns["returns"], self.config.clip.high)
        value_loss = losses.normalise(errors, batch, self.by)
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
        loss = losses.preference(margin, self.config.dpo.beta, self.config.dpo.loss).sum() / pairs
        return loss, {
            "loss/dpo": loss.detach(),
            "dpo/accuracy": (margin.detach() > 0).float().sum() / pairs,
            "dpo/margin": self.config.dpo.beta * margin.detach().sum() / pairs,
        }
