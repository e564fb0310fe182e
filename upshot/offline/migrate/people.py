"""Conversions of those who take part: the simulated user, the judge, the monitor, classmates; which model each is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from upshot.offline.migrate.convert import CONVERSIONS, Omission, Values, as_list, conversion

PROVIDERS = {"gpt": "openai", "o1": "openai", "o3": "openai", "claude": "anthropic", "gemini": "gemini"}


@conversion
def user(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """The simulated user's model and its sampling."""
    given = _mapping(value)
    own = {f"futures.user.{k}": given[k] for k in ("temperature", "max_tokens") if k in given}
    return {"models.user": spec(given), "futures.user.name": "llm", "futures.user.model": "user", **own}


@conversion
def interaction(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """The file of the simulated user, which is given beside the script or not at all."""
    if any(key.startswith("interaction.") for key in theirs):
        return {}
    raise Omission("give that file as well; without it the user is the published one, gpt-4o-mini")


@conversion
def user_model(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """The simulated user's model."""
    return {"models.user.model": spec({"model": value}), "futures.user.name": "llm", "futures.user.model": "user"}


@conversion
def user_option(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """The simulated user's sampling, under the same names."""
    return {f"futures.user.{part}": value}


@conversion
def user_retries(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """How often a failed call is repeated."""
    return {"models.user.retries": value}


@conversion
def assistant(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """The policy's sampling; which model it is `--model_name` says."""
    given = _mapping(value)
    return {f"episode.{k}": given[k] for k in ("temperature", "max_tokens", "top_p") if k in given}


@conversion
def judge(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """The judge's model."""
    return {"models.judge": spec(_mapping(value) if not _is_name(value) else {"model": value})}


@conversion
def judge_tokens(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """A limit of the judge's answers."""
    raise Omission("each judged metric has its own max_tokens (2048): reward.metrics.accuracy.max_tokens=…")


@conversion
def monitor(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """The model that reads thoughts at evaluation."""
    return {"models.monitor": spec({"model": value}), "eval.monitor": "monitor"}


@conversion
def classmates(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    """Each classmate a helper model, with its own markers where they are set."""
    out: dict[str, Any] = {}
    found = []
    marks = [theirs.get(f"reward_model.classmate_think_{end}_str") for end in ("start", "end")]
    for number, model in enumerate(as_list(value)):
        own = "peer" if number == 0 else f"peer{number + 1}"
        out[f"models.{own}"] = f"local:{model}"
        found.append({"name": own, **({"think": marks} if all(marks) else {})})
    return {**out, "futures.classmates": found}


def _think(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    marks = [theirs.get(f"reward_model.think_{end}_str") for end in ("start", "end")]
    if not all(marks):
        raise Omission("a marker alone; both are needed")
    return {"episode.think": marks}


def _with_classmates(value: Any, theirs: Values, part: str) -> dict[str, Any]:
    return {}  # carried with the classmates themselves


CONVERSIONS |= {"think_open": _think, "think_close": _think}
CONVERSIONS |= {"classmate_open": _with_classmates, "classmate_close": _with_classmates}


def spec(given: Mapping[str, Any]) -> Any:
    """A model of litellm's naming as a spec: an address, a provider's, or a Hub name in this process."""
    model = str(given.get("model", ""))
    address = given.get("api_base") or given.get("base_url")
    if address:
        return {"url": address, "model": model.removeprefix("openai/")}
    if "/" not in model:
        provider = next((p for start, p in PROVIDERS.items() if model.startswith(start)), "openai")
        return f"{provider}/{model}"
    known = PurePath(model).parts[0] in {"openai", "anthropic", "gemini", "azure", "together_ai", "groq", "mistral"}
    return model if known else f"local:{model}"


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and not value.lstrip().startswith("{")


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise Omission("it is no JSON object") from error
    if not isinstance(value, Mapping):
        raise Omission("it is no JSON object")
    return value
