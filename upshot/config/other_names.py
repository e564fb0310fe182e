"""Keys and values under other names: what they were called here before, and what other projects call them.

Whoever uses such a word is refused, with ours in the message. Of others' only what people type by themselves; whole
configs are carried over by `upshot recipe import`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

RENAMED_KEYS = {
    "undecided": "verdict",
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
FOREIGN_KEYS = {
    **dict.fromkeys(("learning_rate", "learningrate", "actor_lr"), "train.lr"),
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), "train.prompts_per_step"),
    **dict.fromkeys(("num_generations", "rollouts_per_example", "num_samples"), "train.group_size"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "total_epochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "total_training_steps"), "train.steps"),
    **dict.fromkeys(("model_name", "model_path", "model_name_or_path", "base_model"), "model.path"),
    **dict.fromkeys(("max_new_tokens", "max_completion_length", "max_response_length"), "episode.max_tokens"),
    **dict.fromkeys(("kl_coef", "kl_loss_coef"), "train.kl"),
    **dict.fromkeys(("warmup", "warmup_ratio"), "train.schedule.warmup_steps"),
    **dict.fromkeys(("output_dir", "out_dir", "output"), "run_dir"),
    **dict.fromkeys(("dataset", "train_file", "data_path"), "task.file (sft, dpo: train.data)"),
    **dict.fromkeys(("algorithm", "algo", "adv_estimator"), "train.method"),
    "num_rollouts": "futures.samples",
    "system_prompt": "episode.system",
    "report_to": "trackers",
    "save_steps": "train.save.every",
    "eval_steps": "eval.every",
}
"""Word → our dotted key."""
FOREIGN_VALUES = {
    "train.method": {
        **{name: f"train.method=rl train.advantage={name}" for name in ("grpo", "dr-grpo", "rloo", "gdpo")},
        **dict.fromkeys(("drgrpo", "dr_grpo"), "train.method=rl train.advantage=dr-grpo"),
        **dict.fromkeys(("reinforce", "reinforce++"), "train.method=rl train.advantage=reinforce++"),
        **{name: f"train.method=rl train.loss={name}" for name in ("gspo", "cispo")},
        **dict.fromkeys(("online_dpo", "onlinedpo"), "train.method=online-dpo"),
    }
}
"""Of a key of ours, value → how it is said here."""


def refuse_old_options(parser: argparse.ArgumentParser) -> None:
    """Make a command refuse the old names of its options."""
    for old, new in RENAMED_ARGUMENTS.items():
        parser.add_argument(
            f"--{old}", type=refuse_option(f"--{new} {{}}"), default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def refuse_option(new: str) -> Callable[[str], None]:
    """The type of an option under its old name: a value is refused, with how it is said now ({}: the value)."""

    def refuse(value: str) -> None:
        raise argparse.ArgumentTypeError(f"it is {new.format(value)} now")

    return refuse


def translate_value(key: str, value: Any) -> str:
    """How a value of others is said here; empty where it is none of theirs."""
    return FOREIGN_VALUES.get(key, {}).get(str(value).lower(), "")


def translate_key(word: str, value: Any, known: Iterable[str]) -> str:
    """The tail of an error about an unknown key: where it is here; empty where nobody can tell.

    word: what was written, without its section. known: all dotted keys. A key of another section is found by its name.
    """
    own = FOREIGN_KEYS.get(word.lower())
    places = [own] if own else sorted((key for key in known if key.rpartition(".")[2] == word), key=_depth)
    if not places:
        return ""
    if said := translate_value(places[0], value):
        return f"here it is {said}"
    return f"here it is {' or '.join(places[:3])}"


def _depth(key: str) -> tuple[bool, int, str]:
    """What a run is made by comes before its warm start, evaluation and budget; then by how deep it stands."""
    return key.partition(".")[0] in ("warm_start", "eval", "budget", "models"), key.count("."), key
