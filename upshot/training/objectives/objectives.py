"""What the learner minimises: the policy gradient, and what an objective of any method is. The losses of the other
methods stand beside their loops.

Shapes: M trained tokens of S sequences, one after the other. Every token loss is reduced by `normalise`, whose modes
are named in the recipe (`train.length_norm`). Denominators are passed in, so that a step split into micro-batches gives
exactly the gradient of the whole.

A surrogate turns log-probabilities, ratios and advantages into a loss per trained token. Your own is a function, named
by its path: `train.loss: my_pkg.module:surrogate`, or with its keyword arguments beside it: `{name:
my_pkg.module:surrogate, strength: 2}`. It gets the batch (`columns["old"]`, `columns["advantages"]`, and which sequence
a token is of), the policy's log-probabilities of the trained tokens, and the recipe's `train` section.

Sampler and learner compute one model twice. Before a step's first update both have the same weights: how far apart they
are (drift) is rounding (other kernels, merged adapters), or a fault. Steps played ahead are a few versions behind as
well. Importance ratios and clipping see all of it as a change of the policy. With `train.importance` the learner's own
log-probabilities before the first update are what the ratio of the policy gradient is to (`Datum.old`), and each
token's loss is weighted by learner / sampler, cut at bounds; the sampler's stay beside them (`Datum.sampled`). Without
it, the sampler's count as the learner's own. A step's only update needs no forward of its own for that: it computes
them anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from upshot.config.recipe import ImportanceConfig, TrainConfig
from upshot.config.registry import Registry, with_options
from upshot.core.errors import UserError
from upshot.core.score import show
from upshot.training.learner.batch import Datum, ForwardOutput, TrainBatch
from upshot.training.learner.distributed.ranks import ALONE, Ranks

Logs = dict[str, Tensor]
"""Scalars where they were computed: to read one at once would wait for the GPU in every micro-batch."""
MEAN, LARGEST = "policy/drift", "policy/drift_max"
"""How the drift is logged."""
RATIO, RATIO_MAX, RATIO_CUT = "policy/importance", "policy/importance_max", "policy/importance_cut"
"""How the ratios are: their mean, the largest, the share out of bounds."""


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
        lengths = [len(datum.places) for datum in data]
        counted = [length for length, datum in zip(lengths, data, strict=True) if datum.counted]
        self.by = Denominator(mode, len(counted), sum(counted), max_tokens)
        self.tokens = sum(lengths)

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


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Losses of the trained tokens, and what to log."""

    loss_M: Tensor
    ratio_M: Tensor
    """The policy's probability over that at sampling time."""
    clipped_M: Tensor
    """1 where the clip binds: where the token is not pushed any further."""


Surrogate = Callable[[TrainBatch, Tensor, TrainConfig], PolicyLoss]

surrogates: Registry[PolicyLoss] = Registry("surrogate", "upshot.training.objectives.surrogates")
"""Surrogates that a recipe can name in `train.loss`."""


def surrogate(name: str, options: Mapping[str, Any] | None = None, where: str = "train.loss") -> Surrogate:
    """The surrogate behind a name or path, with its options."""
    function = surrogates.get(name, where)
    loss = with_options(function, options, ("batch", "logprobs_M", "config"), f"surrogate '{name}'", where)
    return partial(_checked, loss, name) if ":" in name else loss


def _checked(surrogate: Surrogate, name: str, batch: TrainBatch, logprobs_M: Tensor, config: TrainConfig) -> PolicyLoss:
    """The losses by a surrogate of the user's own; refused if they are not one number per trained token (a mean over
    them would be divided by their number once more), or have no gradient."""
    loss = surrogate(batch, logprobs_M, config)
    message = f"train.loss '{name}' should return a PolicyLoss with one number per trained token, not a sum or mean; "
    if not isinstance(loss, PolicyLoss):
        raise UserError(f"{message}it returned {show(loss)}")
    for field in ("loss_M", "ratio_M", "clipped_M"):
        shape = getattr(value := getattr(loss, field), "shape", None)
        if shape is None:
            raise UserError(f"{message}its {field} is {show(value)}, not a tensor")
        if shape != logprobs_M.shape:
            raise UserError(f"{message}its {field} has the shape {tuple(shape)} instead of {tuple(logprobs_M.shape)}")
    if logprobs_M.requires_grad and not loss.loss_M.requires_grad:
        raise UserError(f"train.loss '{name}': loss_M has no gradient; compute it from logprobs_M without detach()")
    return loss


class PolicyGradient(Objective):
    """The surrogate that the recipe names, with an optional KL penalty to the initial model and an entropy bonus."""

    def __init__(
        self, config: TrainConfig, importance: ImportanceConfig | None = None, function: Surrogate | None = None
    ) -> None:
        self.config = config
        self.surrogate = function or surrogate(config.loss.name, config.loss.options)
        """Looked up here where the caller has not done so."""
        self.needs_entropy = bool(config.entropy)
        self.importance = importance
        """How tokens are weighted by the log-probabilities of this forward; None: they are weighted already, or not."""
        self._gaps: list[Tensor] = []
        """Of each micro-batch: how far its log-probabilities are from the sampled ones (`measure_gaps`)."""

    def loss(self, batch: TrainBatch, output: ForwardOutput) -> tuple[Tensor, Logs]:
        """Surrogate x importance + kl x divergence - entropy bonus."""
        batch = self.watch(batch, output.logprobs.detach())
        config, columns, logprobs = self.config, batch.columns, output.logprobs
        pg = self.surrogate(batch, logprobs, config)
        # Where tokens are weighted, the surrogate's ratio is to the learner before the step, not to the sampler.
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

    def watch(self, batch: TrainBatch, logprobs: Tensor) -> TrainBatch:
        """Take note of a micro-batch; as it is, or weighted by the learner's log-probabilities [M]."""
        if not len(logprobs):
            return batch
        sampled = batch.columns["old"]
        differences = logprobs - sampled
        if self.importance is None:
            self._gaps.append(measure_gaps(differences))
            return batch
        weights, gaps = weigh_tokens(differences, batch.sums(differences)[batch.owner], self.importance)
        self._gaps.append(gaps)
        return replace(batch, columns={**batch.columns, "old": logprobs, "sampled": sampled, "weights": weights})

    def drift(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Mean and largest difference, and what was made of it, over all ranks; nothing where nothing was sampled."""
        of_rank = [gap.tolist() for gap in self._gaps]  # at the end: the device is not waited for in between
        return join_gaps(list(chain.from_iterable(ranks.all_gather_object("drift", of_rank))))


class LogprobSource(Protocol):
    """What a learner says of data without learning from them: ours, or numbers that another program's has computed."""

    @property
    def config(self) -> TrainConfig:
        """How the policy learns."""

    def logprobs(self, data: Sequence[Datum], reference: bool = False) -> list[list[float]]:
        """Log-probabilities of the trained tokens beside the ids, 0 elsewhere; of the policy or the reference."""

    def values(self, data: Sequence[Datum]) -> list[list[float]]:
        """The value head's estimate before each trained token of the data."""


def set_importance(learner: LogprobSource, data: Sequence[Datum]) -> dict[str, float]:
    """Set `old`, `sampled` and `weights` of the data where the recipe asks for it; what to log."""
    config = learner.config.importance
    if config.rule == "none":
        return {}
    gaps: list[list[float]] = []
    for datum, logprobs in zip(data, learner.logprobs(data), strict=True):
        places = datum.places
        datum.sampled, datum.old, datum.weights = datum.old, logprobs, [0.0] * len(datum.ids)
        if places:
            differences = torch.tensor([logprobs[i] - datum.sampled[i] for i in places], dtype=torch.float64)
            weights, measured = weigh_tokens(differences, differences.sum().expand(len(places)), config)
            gaps.append(measured.tolist())
            for place, weight in zip(places, weights.tolist(), strict=True):
                datum.weights[place] = weight
    return join_gaps(gaps)


def weigh_tokens(differences: Tensor, of_sequence: Tensor, config: ImportanceConfig) -> tuple[Tensor, Tensor]:
    """The weight of each token, learner / sampler within bounds, and what `measure_gaps` says of the ratios.

    differences: learner - sampler in log-probability, by token. of_sequence: the sum of those of the token's sequence.
    """
    ratios = (of_sequence if config.level == "sequence" else differences).clamp(max=80.0).exp()  # float32 ends there
    outside = (ratios < config.low) | (ratios > config.high)
    weights = ratios.clamp(config.low, config.high)
    weights = weights.masked_fill(outside, 0.0) if config.rule == "mask" else weights
    return weights, measure_gaps(differences, ratios, outside)


def measure_gaps(differences: Tensor, ratios: Tensor | None = None, outside: Tensor | None = None) -> Tensor:
    """Tokens, the sum of their differences, the largest; of ratios their sum, the largest, how many are outside."""
    gap = differences.abs()
    numbers = [torch.full_like(gap[0], len(gap)), gap.sum(), gap.amax()]
    if ratios is not None and outside is not None:
        numbers += [ratios.sum(), ratios.amax(), outside.sum().to(ratios)]
    return torch.stack(numbers)


def join_gaps(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """What to log of several `measure_gaps`."""
    if not rows:
        return {}
    count, gaps, largest, *of_ratios = zip(*rows, strict=True)
    logs = {MEAN: sum(gaps) / sum(count), LARGEST: max(largest)}
    if of_ratios:
        ratios, highest, outside = of_ratios
        logs |= {RATIO: sum(ratios) / sum(count), RATIO_MAX: max(highest), RATIO_CUT: sum(outside) / sum(count)}
    return logs
