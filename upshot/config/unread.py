"""Keys of a recipe that are set and have no effect: with the training method, or beside the value of another key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upshot.config.method import method_of, methods
from upshot.config.recipe import Recipe


def describe_unread(recipe: Recipe) -> dict[str, str]:
    """What to say of each key that is set and has no effect, by its path."""
    train = recipe.train
    known = {name: method_of(name).reads for name in methods.names()}
    messages = {}
    ours = train.method in known  # a method of the user's own may read any key
    for key in type(train).model_fields if ours else ():
        readers = ", ".join(name for name, keys in known.items() if key in keys)
        if readers and key not in known[train.method] and _is_set(train, key):
            messages[f"train.{key}"] = f"with train.method={train.method}, only with {readers}"
    for path, section, keys, cause in _idle(recipe):
        for key in keys.split() if (ours or not path.startswith("train")) and path not in messages else ():
            if _is_set(section, key):
                messages[f"{path}.{key}"] = f"with {cause}"
    return {key: f"{key} has no effect {why}; leave it out" for key, why in messages.items()}


def _idle(recipe: Recipe) -> Iterator[tuple[str, Any, str, str]]:
    """Sections, keys of them that nothing reads, and the value that makes it so."""
    train = recipe.train
    kl, value_head = train.kl, method_of(train.method).value_head
    if not kl.weight:
        yield "train.kl", kl, "where estimator", "train.kl.weight=0"
    elif kl.where == "reward" or value_head:
        cause = f"train.method={train.method}" if value_head else "train.kl.where=reward"
        yield "train.kl", kl, "estimator", cause
    if train.importance.rule == "none":
        yield "train.importance", train.importance, "level low high", "train.importance.rule=none"
    if train.schedule.name == "constant":
        yield "train.schedule", train.schedule, "min_lr", "train.schedule.name=constant"
    if train.loss.name == "reinforce" and not value_head:  # whose value estimates are clipped, too
        yield "train", train, "clip", "train.loss=reinforce"
    elif train.loss.name in ("cispo", "reinforce"):
        yield "train.clip", train.clip, "low", f"train.loss={train.loss.name}"
    for name, rule in (("overlong", recipe.reward.overlong), ("malformed", recipe.reward.malformed)):
        if rule.rule != "penalty":
            yield f"reward.{name}", rule, "penalty", f"reward.{name}.rule={rule.rule}"


def _is_set(section: Any, key: str) -> bool:
    return bool(getattr(section, key) != type(section).model_fields[key].get_default(call_default_factory=True))
