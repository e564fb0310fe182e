"""A surrogate turns log-probabilities, ratios and advantages into a loss per trained token. Pure functions.

Your own is a function, named by its path: `train.loss: my_pkg.module:surrogate`, or with its keyword arguments beside
it: `{name: my_pkg.module:surrogate, strength: 2}`. It gets the batch (`columns["old"]`, `columns["advantages"]`, and
which sequence a token is of), the policy's log-probabilities of the trained tokens, and the recipe's `train` section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from upshot.config.recipe import TrainConfig
from upshot.config.registry import Registry, check_options
from upshot.core.errors import UserError
from upshot.training.learner.batch import TrainBatch


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Losses of the trained tokens, and what to log."""

    loss_M: Tensor
    ratio_M: Tensor
    """The policy's probability over that at sampling time."""
    clipped_M: Tensor
    """1 where the clip binds: where the token is not pushed any further."""


def check_shape(loss: PolicyLoss, logprobs_M: Tensor, name: str) -> None:
    """Refuse a surrogate of the user's own whose result is not one number a trained token: a mean over them would be
    divided by their number once more."""
    for field in ("loss_M", "ratio_M", "clipped_M"):
        shape = getattr(getattr(loss, field, None), "shape", None)
        if shape != logprobs_M.shape:
            returned = "nothing of that name" if shape is None else f"the shape {tuple(shape)}"
            raise UserError(
                f"train.loss '{name}' should return a PolicyLoss with one number a trained token; its {field} has "
                f"{returned} instead of {tuple(logprobs_M.shape)}: leave sums and means to train.length_norm"
            )


Surrogate = Callable[[TrainBatch, Tensor, TrainConfig], PolicyLoss]

surrogates: Registry[PolicyLoss] = Registry("surrogate", "upshot.training.objectives.surrogates")
"""Surrogates that a recipe can name in `train.loss`."""


def surrogate(name: str, options: Mapping[str, Any] | None = None, where: str = "train.loss") -> Surrogate:
    """The surrogate behind a name or path, with its options."""
    function = surrogates.get(name, where)
    arguments = {"batch": None, "logprobs_M": None, "config": None}
    checked = check_options(function, options or {}, arguments, f"surrogate '{name}'", where)
    return partial(function, **{key: value for key, value in checked.items() if key not in arguments})
