"""Keys of a recipe that are set and have no effect: with the training method, or beside the value of another key."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from upshot.config.method import method_of, methods
from upshot.config.recipe import Recipe

IDLE: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("train.kl.weight", (0,), "train.kl.where train.kl.estimator"),
    ("train.kl.where", ("reward",), "train.kl.estimator"), ("train.method", ("ppo",), "train.kl.estimator"),
    ("train.importance.rule", ("none",), "train.importance.level train.importance.low train.importance.high"),
    ("train.schedule.name", ("constant",), "train.schedule.min_lr"),
    ("train.loss.name", ("cispo", "reinforce"), "train.clip.low"),
    ("reward.overlong.rule", ("score", "missing"), "reward.overlong.penalty"),
    ("reward.malformed.rule", ("score", "missing"), "reward.malformed.penalty"),
)  # fmt: skip
"""In each row: a key, some of its values, and the keys that have no effect with these values."""


def describe_unread(recipe: Recipe) -> dict[str, str]:
    """What to say of each key that is set and has no effect, by its path."""
    method = recipe.train.method
    known, messages = {name: method_of(name).reads for name in methods.names()}, dict[str, str]()
    for key in type(recipe.train).model_fields if method in known else ():  # what your own code reads is not known
        readers = ", ".join(name for name, keys in known.items() if key in keys)
        if readers and key not in known[method] and _is_set(recipe, f"train.{key}"):
            messages[f"train.{key}"] = f"with train.method={method}, only with {readers}"
    for other, values, keys in IDLE:
        if (value := attrgetter(other)(recipe)) in values and (method in known or other.startswith("reward")):
            unread = [key for key in keys.split() if key.rpartition(".")[0] not in messages and _is_set(recipe, key)]
            messages |= dict.fromkeys(unread, f"with {other}={value}")
    return {key: f"{key} has no effect {why}; leave it out" for key, why in messages.items()}


def _is_set(recipe: Recipe, key: str) -> bool:
    path, _, name = key.rpartition(".")
    section = attrgetter(path)(recipe)
    return bool(getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True))
