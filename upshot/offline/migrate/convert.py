"""Values of theirs that mean the same under another form here: conversions, by the name that `how` has in table.yaml.

Each gives recipe keys with their values. One that cannot raises `Omission` with the reason; the setting is then listed
as not carried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

PROVIDERS = {"gpt": "openai", "o1": "openai", "o3": "openai", "claude": "anthropic", "gemini": "gemini"}
HOSTED = ("openai", "anthropic", "gemini", "azure", "together_ai", "groq", "mistral")
KL_IN_LOSS, KL_IN_REWARD = "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"
USER = {"futures.user.name": "llm", "futures.user.model": "user"}
Keys = dict[str, Any]


class Omission(Exception):
    """Why a setting was not carried."""


class Given(NamedTuple):
    """A setting of theirs on its way into the recipe."""

    key: str
    """The recipe key that the table names."""
    part: str
    """The last part of its name there."""
    value: Any
    others: Mapping[str, Any]
    """All their settings."""


def _refuse(why: str) -> Any:
    raise Omission(why)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else _refuse("it is no whole number that can be read off the script")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _mapping(value: Any) -> Mapping[str, Any]:
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        value = None
    return value if isinstance(value, Mapping) else _refuse("it is no JSON object")


def _some(value: Any, prefix: str, *names: str) -> Keys:
    """Some of the values of a JSON object, under the same names."""
    return {f"{prefix}.{name}": _mapping(value)[name] for name in names if name in _mapping(value)}


def spec(given: Mapping[str, Any]) -> Any:
    """A model of litellm's naming as a spec: an address, a provider's, or a Hub name in this process."""
    model, address = str(given.get("model", "")), given.get("api_base") or given.get("base_url")
    if address:
        return {"url": address, "model": model.removeprefix("openai/")}
    if "/" not in model:
        return f"{next((p for start, p in PROVIDERS.items() if model.startswith(start)), 'openai')}/{model}"
    return model if model.split("/")[0] in HOSTED else f"local:{model}"


def _judge(s: Given) -> Keys:
    named = isinstance(s.value, str) and not s.value.lstrip().startswith("{")
    return {"models.judge": spec({"model": s.value} if named else _mapping(s.value))}


def _metrics(s: Given) -> Keys:
    """Names and weights of the original's two flags; its token_amount counts thousands."""
    names = _list(s.others.get("--metric_names", []))
    weights = _list(s.others.get("--metric_weights", [1.0] * len(names)))
    if len(weights) != len(names):
        raise Omission(f"{len(names)} metrics and {len(weights)} weights")
    return {f"metrics.{n}": w / 1000 if n == "token_amount" else w for n, w in zip(names, weights, strict=True)}


def _minibatches(s: Given) -> Keys:
    """How many updates a step's prompts make."""
    batch = s.others.get("data.train_batch_size")
    if not isinstance(batch, int) or not isinstance(s.value, int) or s.value < 1:
        raise Omission("it is counted against data.train_batch_size, which is not set")
    return {s.key: max(1, batch // s.value)}


def _batch(s: Given) -> Keys:
    """Examples of an update: those of a device times the accumulation times the processes."""
    size = s.others.get("--batch_size", s.others.get("--per_device_train_batch_size", 1))
    for factor in ("--gradient_accumulation_steps", "--nproc_per_node"):
        size *= s.others.get(factor, 1)
    return {s.key: _whole(size)}


def _file(s: Given) -> Keys:
    """One file; the home folder as `~`."""
    if len(_list(s.value)) != 1:
        raise Omission("a task reads one file a split; put them into a folder, or mix tasks (task.name=mix)")
    return {s.key: re.sub(r"^\$\{?HOME\}?", "~", str(_list(s.value)[0]))}


def _kl_in_reward(s: Given) -> Keys:
    if s.value and s.others.get(KL_IN_LOSS):
        raise Omission("the KL divergence is in the loss (use_kl_loss) or taken off the reward, not both")
    return {s.key: "reward"} if s.value else {}


def _interaction(s: Given) -> Keys:
    """The file of the simulated user, which is given beside the script or not at all."""
    if not any(key.startswith("interaction.") for key in s.others):
        raise Omission("give that file as well; without it the user is the published one, gpt-4o-mini")
    return {}


def _marks(s: Given, whose: str = "") -> Any:
    marks = [s.others.get(f"reward_model.{whose}think_{end}_str") for end in ("start", "end")]
    return marks if all(marks) else None


def _classmates(s: Given) -> Keys:
    """Each classmate a helper model, with its own markers where they are set."""
    models = {"peer" if n == 0 else f"peer{n + 1}": f"local:{model}" for n, model in enumerate(_list(s.value))}
    think = {"think": marks} if (marks := _marks(s, "classmate_")) else {}
    return {**{f"models.{n}": model for n, model in models.items()}, s.key: [{"name": n, **think} for n in models]}


CONVERSIONS: dict[str, Callable[[Given], Keys]] = {
    "assistant": lambda s: _some(s.value, "episode", "temperature", "max_tokens", "top_p"),
    "batch": _batch,
    "classmates": _classmates,
    "clip": lambda s: {"train.clip_low": s.value, "train.clip_high": s.value},  # one number there
    "file": _file,
    "interaction": _interaction,
    "judge": _judge,
    "judge_tokens": lambda s: _refuse("each judged metric has its own (2048): reward.metrics.accuracy.max_tokens=…"),
    # A weight of the KL divergence counts where that is on: in the loss, or off the reward.
    "kl": lambda s: {s.key: s.value} if s.others.get(KL_IN_LOSS, not s.others.get(KL_IN_REWARD)) else {},
    "kl_in": _kl_in_reward,
    "kl_of_reward": lambda s: {s.key: s.value} if s.others.get(KL_IN_REWARD) and not s.others.get(KL_IN_LOSS) else {},
    "kl_on": lambda s: {} if s.value or s.others.get(KL_IN_REWARD) else {s.key: 0.0},
    "lora": lambda s: {"model.lora.r": s.others.get("--peft_r", 32)} if s.value else {},
    "metrics": _metrics,
    "minibatches": _minibatches,
    "monitor": lambda s: {"models.monitor": spec({"model": s.value}), s.key: "monitor"},
    "name": lambda s: {s.key: re.sub(r"[^\w.-]+", "-", str(s.value)).strip("-")[:80]},
    "names": lambda s: (
        {} if s.value == "all-linear" else {s.key: [n.strip() for one in _list(s.value) for n in str(one).split(",")]}
    ),
    "not_negative": lambda s: {s.key: max(0, _whole(s.value))},  # −1 there is 0 here
    "rank": lambda s: {s.key: s.value} if s.value else {},  # rank 0 trains all weights
    "rounds": lambda s: {s.key: (int(s.value) + 1) // 2},  # messages there, pairs of them here
    "think": lambda s: {s.key: _marks(s) or _refuse("a marker alone; both are needed")},
    "trackers": lambda s: {s.key: [one for one in _list(s.value) if one in ("wandb", "tensorboard", "trackio")]},
    "user": lambda s: {
        "models.user": spec(_mapping(s.value)),
        **USER,
        **_some(s.value, "futures.user", "temperature", "max_tokens"),
    },
    "user_model": lambda s: {"models.user.model": spec({"model": s.value}), **USER},
    "user_option": lambda s: {f"futures.user.{s.part}": s.value},
    "user_retries": lambda s: {"models.user.retries": s.value},
    "wandb": lambda s: {s.key: ["wandb"]},  # a project means that it is used
    "weight": lambda s: {f"metrics.{s.part}": s.value},
    "with_classmates": lambda s: {},  # carried with the classmates themselves
}
