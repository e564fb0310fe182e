"""Keys and arguments that had other names: whoever still uses one is refused, with the new name in the message."""

from __future__ import annotations

import argparse
from collections.abc import Callable

RENAMED_KEYS = {
    "futures.window": "futures.rounds",
    "train.warmup_steps": "train.schedule.warmup_steps",
    "train.min_lr": "train.schedule.min_lr",
    "train.weight_decay": "train.optimizer.weight_decay",
    "train.betas": "train.optimizer.betas",
    "train.grad_clip": "train.optimizer.grad_clip",
    "train.offload_optimizer": "train.optimizer.offload",
    "train.clip_low": "train.clip.low",
    "train.clip_high": "train.clip.high",
    "train.kl_in": "train.kl.where",
    "train.kl_estimator": "train.kl.estimator",
    "train.beta": "train.dpo.beta",
    "train.dpo_loss": "train.dpo.loss",
    "train.min_gap": "train.dpo.min_gap",
    "train.gae_lambda": "train.ppo.gae_lambda",
    "train.gamma": "train.ppo.gamma",
    "train.whiten": "train.ppo.whiten",
    "train.value_weight": "train.ppo.value_weight",
    "train.save_every": "train.save.every",
    "train.save_minutes": "train.save.minutes",
    "train.keep": "train.save.keep",
    "train.keep_best": "train.save.best",
}
"""Old dotted key → new one."""
RENAMED_ARGUMENTS = {"window": "rounds"}
"""Of `upshot.reward` and, with two dashes before them, of the commands that score: old → new."""


def refuse_old_options(parser: argparse.ArgumentParser) -> None:
    """Make a command refuse the old names of its options."""
    for old, new in RENAMED_ARGUMENTS.items():
        parser.add_argument(f"--{old}", type=_refuse(new), default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _refuse(new: str) -> Callable[[str], None]:
    def refuse(value: str) -> None:
        raise argparse.ArgumentTypeError(f"it is --{new} {value} now")

    return refuse
