"""Values of theirs that mean the same under another form here. Each conversion gives recipe keys with their values.

A conversion that cannot raises `Omission` with the reason; the setting is then listed as not carried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Values = Mapping[str, Any]
Conversion = Callable[[Any, Values, str], dict[str, Any]]
CONVERSIONS: dict[str, Conversion] = {}
"""By the name that `how` has in table.yaml; called with the value, all settings, and the last part of the key."""
THOUSANDS = 1000
"""Tokens of one unit of the original's token_amount."""
KL_IN_LOSS, KL_IN_REWARD = "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"


class Omission(Exception):
    """Why a setting was not carried."""


def conversion(function: Conversion) -> Conversion:
    """Decorator: known by the function's name."""
    CONVERSIONS[function.__name__] = function
    return function


def _same(key: str, words: Mapping[str, Any], what: str) -> Conversion:
    def convert(value: Any, theirs: Values, part: str) -> dict[str, Any]:
        if str(value) not in words:
            raise Omission(f"{what} are {', '.join(words)}")
        return {key: words[str(value)]}

    return convert


ESTIMATORS = {
    "grpo": "grpo",
    "grpo_w_classmate": "dr-grpo",
    "rloo": "rloo",
    "gdpo": "gdpo",
    "gdpo_wo_bn": "separated",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": {"name": "reinforce++", "baseline": "group"},
}
NORMS = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
KINDS = {
    "vanilla_reward": "vanilla",
    "remove_wo_cot": "without-thought",
    "random_truncate": "vanilla",
    "help_other_questions": "other-question",
    "help_other_similar_questions": "similar-question",
}
CONVERSIONS |= {
    "loss": _same("train.loss", {"vanilla": "clipped", "gspo": "gspo", "cispo": "cispo"}, "losses that are known"),
    "length_norm": _same("train.length_norm", NORMS, "ways to average that are known"),
    "kl_type": _same("train.kl.estimator", {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2"}, "KL estimators"),
    "classmate_reward": _same("futures.reward", KINDS, "classmate rewards"),
    "classmate_tokens": _same("futures.tokens", {"classmate_partial": "kept", "all": "all"}, "token modes"),
    "classmate_mode": _same("futures.mode", {"continue_cot": "continue", "answer": "answer"}, "continue modes"),
}


@conversion
def estimator(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """gae is PPO, a method; the others are estimators."""
    if value == "gae":
        return {"train.method": "ppo"}
    if value not in ESTIMATORS:
        raise Omission(f"estimators that are known: gae, {', '.join(ESTIMATORS)}")
    return {"train.advantage": ESTIMATORS[value]}


@conversion
def by_std(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """Without the standard deviation GRPO is Dr.GRPO."""
    return {} if value else {"train.advantage": "dr-grpo"}


@conversion
def kl_on(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """Off is a weight of 0, unless it is in the reward; on is what the weight says."""
    return {} if value or theirs.get(KL_IN_REWARD) else {"train.kl.weight": 0.0}


@conversion
def kl(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """The weight counts where the loss is on."""
    return {"train.kl.weight": value} if theirs.get(KL_IN_LOSS, not theirs.get(KL_IN_REWARD)) else {}


@conversion
def kl_in(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """Off the reward; with the loss on as well only one of them can be had."""
    if value and theirs.get(KL_IN_LOSS):
        raise Omission("the KL divergence is in the loss (use_kl_loss) or taken off the reward, not both")
    return {"train.kl.where": "reward"} if value else {}


@conversion
def kl_of_reward(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """The weight of the KL divergence counts where it is taken off the reward."""
    return {"train.kl.weight": value} if theirs.get(KL_IN_REWARD) and not theirs.get(KL_IN_LOSS) else {}


@conversion
def clip(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """One number there, two here."""
    return {"train.clip.low": value, "train.clip.high": value}


@conversion
def minibatches(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """How many updates a step's prompts make."""
    batch = theirs.get("data.train_batch_size")
    if not isinstance(batch, int) or not isinstance(value, int) or value < 1:
        raise Omission("it is counted against data.train_batch_size, which is not set")
    return {"train.minibatches": max(1, batch // value)}


@conversion
def batch(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """Examples of an update: those of a device times the accumulation times the processes."""
    size = theirs.get("--batch_size", theirs.get("--per_device_train_batch_size", 1))
    for factor in ("--gradient_accumulation_steps", "--nproc_per_node"):
        size *= theirs.get(factor, 1)
    if not isinstance(size, int):
        raise Omission("it is no whole number that can be read off the script")
    return {"train.prompts_per_step": size}


@conversion
def rounds(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """Messages there, pairs of them here."""
    return {"futures.rounds": (int(value) + 1) // 2}


@conversion
def not_negative(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """−1 there is 0 here."""
    keys = {"save_freq": "train.save.every", "test_freq": "eval.every", "top_k": "episode.top_k"}
    if not isinstance(value, int):
        raise Omission("it is no whole number that can be read off the script")
    return {keys.get(part, "train.schedule.warmup_steps"): max(0, value)}


@conversion
def lora(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """The originals' own adapter."""
    return {"model.lora.r": theirs.get("--peft_r", 32)} if value else {}


@conversion
def rank(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """Rank 0 trains all weights."""
    return {"model.lora.r": value} if value else {}


@conversion
def names(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """A list, or names with commas between them; all-linear is the default of models without the seven projections."""
    if value == "all-linear":
        return {}
    return {"model.lora.targets": value if isinstance(value, list) else [v.strip() for v in str(value).split(",")]}


@conversion
def file(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """One file; the home folder as `~`."""
    files = value if isinstance(value, list) else [value]
    if len(files) != 1:
        raise Omission("a task reads one file a split; put them into a folder, or mix tasks (task.name=mix)")
    key = "task.validation_file" if part == "val_files" else "task.train_file"
    return {key: re.sub(r"^\$\{?HOME\}?", "~", str(files[0]))}


@conversion
def name(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """A run is named in one word."""
    return {"name": re.sub(r"[^\w.-]+", "-", str(value)).strip("-")[:80]}


@conversion
def trackers(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """File and console are always there."""
    asked = value if isinstance(value, list) else [value]
    return {"trackers": [one for one in asked if one in ("wandb", "tensorboard", "trackio")]}


@conversion
def wandb(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """A project means that wandb is used."""
    return {"trackers": ["wandb"]}


@conversion
def weight(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """A metric with its weight."""
    return {f"metrics.{part}": value}


@conversion
def metrics(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """Names and weights of the original's two flags; its token_amount counts thousands."""
    asked = as_list(theirs.get("--metric_names", []))
    weights = as_list(theirs.get("--metric_weights", [1.0] * len(asked)))
    if len(weights) != len(asked):
        raise Omission(f"{len(asked)} metrics and {len(weights)} weights")
    given = dict(zip(asked, weights, strict=True))
    return {f"metrics.{n}": w / THOUSANDS if n == "token_amount" else w for n, w in given.items()}


def as_list(value: Any) -> list[Any]:
    """A value that may be a list already."""
    return list(value) if isinstance(value, list) else [value]
