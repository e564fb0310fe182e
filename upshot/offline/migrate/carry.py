"""Settings of theirs → a recipe, and a list of what it could not carry."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from upshot.offline.migrate import people  # noqa: F401 (registers its conversions)
from upshot.offline.migrate.convert import CONVERSIONS, Omission
from upshot.offline.migrate.table import MappingLine, originals
from upshot.offline.migrate.theirs import OriginalSettings

METHODS = {"sft": "sft", "fsdp_sft_trainer": "sft", "offline_dpo": "dpo", "online_dpo": "online-dpo", "ppo": "ppo"}
"""By the last word of what is launched."""
TASKS = {
    **{name: name for name in ("math-hard", "medium", "bigcodebench", "abg-coqa", "gsm8k", "dolci")},
    "hendrycks": "math",
    "code_contests": "code-contests",
    "mmlu": "mmlu-sycophancy",
    **{name: name for name in ("sycophancy", "confidence")},
}
"""By a word in the path of the data, the first that fits."""
BEHAVIOURS = ("sycophancy", "confidence")
DEFAULT_USER = "openai/gpt-4o-mini"
SECRET = re.compile(r"api_?key|secret|password|access_token", re.IGNORECASE)
"""Settings whose values, or parts of them, are nobody's to print."""


@dataclass
class ImportedRecipe:
    """A recipe as nested mappings, and what is not in it."""

    recipe: dict[str, Any] = field(default_factory=dict)
    left: list[tuple[str, Any, str]] = field(default_factory=list)
    """(key, value, why)."""


def carry(theirs: OriginalSettings) -> ImportedRecipe:
    """What can be carried over, in the recipe's own words."""
    done = ImportedRecipe()
    keys: dict[str, Any] = {}
    for name, value in theirs.settings.items():
        if value is None:  # null is the key left out
            continue
        line = _line(theirs.original, name)
        if line is None:
            done.left.append((name, value, "no counterpart is known"))
        elif not line.key:
            done.left.append((name, value, line.reason or f"is `{line.command}`"))
        else:
            try:
                keys |= _converted(line, name, value, theirs.settings)
            except Omission as why:
                done.left.append((name, value, str(why)))
    done.left = [(name, "…" if SECRET.search(f"{name} {value}") else value, why) for name, value, why in done.left]
    clamp = None if theirs.original == "collabllm" else [-1, 1]  # the verl recipe's reward manager bounds every term
    done.recipe = _nested(_with_defaults(keys, theirs, done.left), clamp)
    return done


def _line(original: str, name: str) -> MappingLine | None:
    """The line of a setting; the classmate fork has verl's settings, too."""
    tables = {"classmate": ("classmate", "verl")}.get(original, (original,))
    found = [line for table in tables if (line := originals()[table].find(name)) is not None]
    return max(found, key=lambda line: len(line.theirs), default=None)


def _converted(line: MappingLine, name: str, value: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    if "$" in str(value) and line.how not in ("file", "name", "interaction"):
        raise Omission("the shell alone knows its value")
    if not line.how:
        return {line.key: value}
    return CONVERSIONS[line.how](value, settings, name.rpartition(".")[2])


def _with_defaults(keys: dict[str, Any], theirs: OriginalSettings, left: list[tuple[str, Any, str]]) -> dict[str, Any]:
    """What their programs take for granted: the method, the task, who plays the user."""
    out: dict[str, Any] = {"name": keys.pop("name", theirs.original), **keys}
    method = METHODS.get(PurePath(theirs.program.replace(".py", "").replace(".", "/")).name, "")
    if method:
        out.setdefault("train.method", method)
    method = out.get("train.method", "rl")
    if "task.name" not in out:
        task = _task(str(out.get("task.train_file", "")), theirs.original)
        out |= {"task.name": "judged", "task.behaviour": task} if task in BEHAVIOURS else {"task.name": task}
    if method in ("sft", "dpo"):
        out |= _examples(out, method, theirs, left)
    if theirs.original == "classmate" and "futures.classmates" in out:
        out["futures.name"] = "classmates"
    elif out.get("futures.rounds"):
        if "models.user.model" not in out:
            out.setdefault("models.user", DEFAULT_USER)
        out |= {"futures.user.name": "llm", "futures.user.model": "user"}
    return out


def _examples(
    out: dict[str, Any], method: str, theirs: OriginalSettings, left: list[tuple[str, Any, str]]
) -> dict[str, Any]:
    """Where sft and dpo learn from: the file that is named, or the one that must be made of a published set first."""
    source = str(out.pop("task.train_file", ""))
    out.pop("task.validation_file", None)
    folder = f"data/{out['task.name']}"
    file = f"{folder}/{method}_train.parquet"
    if PurePath(source).suffix in (".parquet", ".jsonl", ".json"):
        file = source
    elif source:
        metric = str(theirs.settings.get("--lower_bound_metric") or "").removeprefix("rewards.")
        least = f" --min {metric}={theirs.settings.get('--lower_bound', 0)}" if metric else ""
        how = f"make the file first: upshot data prepare --dataset {source} --for {method}{least} --out {folder}"
        left.append(("train.data", file, how))
    return {"train.data": file, **({"task.file": file} if out["task.name"] == "collabllm" else {})}


def _task(path: str, original: str) -> str:
    plain = path.lower()
    fallback = "gsm8k" if original == "classmate" else "collabllm"
    return next((task for word, task in TASKS.items() if word in plain), fallback)


def _nested(keys: Mapping[str, Any], clamp: list[int] | None) -> dict[str, Any]:
    """Dotted keys as nested mappings; metrics as the list that a recipe has."""
    out: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for key, value in keys.items():
        if key.startswith("metrics."):
            weights[key.removeprefix("metrics.")] = value
            continue
        node = out
        *parents, last = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    if weights:
        bounds = {"clamp": clamp}
        terms = [{"name": name, "weight": float(weight), **copy.deepcopy(bounds)} for name, weight in weights.items()]
        out.setdefault("reward", {})["metrics"] = terms
    return out
