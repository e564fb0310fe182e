"""Settings of theirs → a recipe, or the line of `upshot data build`; and a list of what it could not carry."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from upshot.offline.migrate.convert import CONVERSIONS, Given, Omission, spec
from upshot.offline.migrate.table import MappingLine, originals
from upshot.offline.migrate.theirs import OriginalSettings

METHODS = {"sft": "sft", "fsdp_sft_trainer": "sft", "offline_dpo": "dpo", "online_dpo": "online-dpo", "ppo": "ppo"}
"""By the last word of what is launched."""
SAME_NAME = ("math-hard", "medium", "bigcodebench", "abg-coqa", "gsm8k", "dolci")
TASKS = {name: name for name in SAME_NAME} | {"hendrycks": "math", "code_contests": "code-contests"}
TASKS |= {"mmlu": "mmlu-sycophancy", "sycophancy": "sycophancy", "confidence": "confidence"}
"""By a word in the path of the data, the first that fits."""
SECRET = re.compile(r"api_?key|secret|password|access_token", re.IGNORECASE)
"""Settings whose values, or parts of them, are nobody's to print."""
BUILD = "upshot data build"
BUILD_DEFAULTS = {"--train_size": 500, "--num_candidate_responses": 2}
BUILD_DEFAULTS |= {"--proact_prompt_ratio": 0.5, "--add_system_prompt_ratio": 0}
"""What their builder takes for granted and ours does not."""


@dataclass
class ImportedRecipe:
    """A recipe as nested mappings, and what is not in it."""

    recipe: dict[str, Any] = field(default_factory=dict)
    left: list[tuple[str, Any, str]] = field(default_factory=list)
    """(key, value, why)."""


def carry(theirs: OriginalSettings) -> ImportedRecipe:
    """What can be carried over, in the recipe's own words."""
    keys: dict[str, Any] = {}
    left = []
    for name, value in theirs.settings.items():
        if value is not None:  # null is the key left out
            try:
                keys |= _convert(theirs, name, value)
            except Omission as why:
                left.append((name, "…" if SECRET.search(f"{name} {value}") else value, str(why)))
    return ImportedRecipe(_nest(_complete(keys, theirs, left), theirs.original), left)


def _convert(theirs: OriginalSettings, name: str, value: Any) -> dict[str, Any]:
    """What a setting is in the recipe; the classmate fork has verl's settings, too."""
    tables = ("classmate", "verl") if theirs.original == "classmate" else (theirs.original,)
    fits = [line for table in tables if (line := originals()[table].find(name)) is not None]
    line: MappingLine | None = max(fits, key=lambda line: len(line.theirs), default=None)
    if line is None:
        raise Omission("no counterpart is known")
    if not line.key:
        raise Omission(line.reason or f"is `{line.command}`")
    if "$" in str(value) and line.how not in ("file", "name", "interaction"):
        raise Omission("the shell alone knows its value")
    if line.how:
        return CONVERSIONS[line.how](Given(line.key, name.rpartition(".")[2], value, theirs.settings))
    if line.values and str(value) not in line.values:
        raise Omission(f"known are {', '.join(line.values)}")
    own = line.values[str(value)] if line.values else value
    return own if line.values and isinstance(own, dict) else {line.key: own}


def _complete(keys: dict[str, Any], theirs: OriginalSettings, left: list[tuple[str, Any, str]]) -> dict[str, Any]:
    """What their programs take for granted: the method, the task, who plays the user."""
    out: dict[str, Any] = {"name": keys.pop("name", theirs.original), **keys}
    method = METHODS.get(_program(theirs), "")
    if method:
        out.setdefault("train.method", method)
    if "task.name" not in out:
        path, usual = str(out.get("task.train_file", "")).lower(), "gsm8k" if theirs.original == "classmate" else ""
        task = next((task for word, task in TASKS.items() if word in path), usual or "collabllm")
        judged = task in ("sycophancy", "confidence")
        out |= {"task.name": "judged", "task.behaviour": task} if judged else {"task.name": task}
    if out.get("train.method") in ("sft", "dpo"):
        out |= _examples(out, theirs, left)
    if theirs.original == "classmate" and "futures.classmates" in out:
        out["futures.name"] = "classmates"
    elif out.get("futures.window"):
        if "models.user.model" not in out:
            out.setdefault("models.user", "openai/gpt-4o-mini")
        out |= {"futures.user.name": "llm", "futures.user.model": "user"}
    return out


def _program(theirs: OriginalSettings) -> str:
    """The last word of what is launched."""
    return re.split(r"[./]", theirs.program.removesuffix(".py"))[-1]


def _examples(out: dict[str, Any], theirs: OriginalSettings, left: list[tuple[str, Any, str]]) -> dict[str, Any]:
    """Where sft and dpo learn from: the file that is named, or the one that must be made of a published set first."""
    source, method = str(out.pop("task.train_file", "")), out["train.method"]
    out.pop("task.validation_file", None)
    folder = f"data/{out['task.name']}"
    file = source if PurePath(source).suffix in (".parquet", ".jsonl", ".json") else f"{folder}/{method}_train.parquet"
    if source and file != source:
        metric = str(theirs.settings.get("--lower_bound_metric") or "").removeprefix("rewards.")
        least = f" --min {metric}={theirs.settings.get('--lower_bound', 0)}" if metric else ""
        how = f"make the file first: upshot data prepare --dataset {source} --for {method}{least} --out {folder}"
        left.append(("train.data", file, how))
    return {"train.data": file, **({"task.file": file} if out["task.name"] == "collabllm" else {})}


def _nest(keys: Mapping[str, Any], original: str) -> dict[str, Any]:
    """Dotted keys as nested mappings; metrics as the list that a recipe has."""
    out: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, last = key.split(".")
        if parents == ["metrics"] or key.startswith("metrics."):
            # The verl recipe's reward manager bounds every term, CollabLLM's own does not.
            clamp = None if original == "collabllm" else [-1, 1]
            term = {"name": key.removeprefix("metrics."), "weight": float(value), "clamp": clamp}
            out.setdefault("reward", {}).setdefault("metrics", []).append(term)
            continue
        node = out
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return out


def builds(theirs: OriginalSettings) -> bool:
    """Whether their script builds data (`scripts.engine.build_dataset`) and trains nothing."""
    return _program(theirs) == "build_dataset"


def build_line(theirs: OriginalSettings) -> tuple[str, ImportedRecipe]:
    """The command, and what it could not carry."""
    theirs = replace(theirs, settings=BUILD_DEFAULTS | theirs.settings)
    carried = carry(theirs)
    flags = dict(_own_flags(theirs.settings))
    carried.left = [item for item in carried.left if item[0] not in flags]
    words = [BUILD, *_options(carried.recipe, theirs.settings.get("--assistant_generation_kwargs")), *flags.values()]
    return " \\\n    ".join(words), carried


def _own_flags(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Their flags that are flags of the builder here, too, with the value where the table has a word in capitals."""
    for name, value in settings.items():
        line = originals()["collabllm"].find(name)
        flag = line.command.removeprefix(BUILD).strip() if line and line.command.startswith(BUILD) else ""
        if flag and "--push" not in flag:  # nothing is published that nobody asked for here
            yield name, re.sub(r"\b[A-Z]+\b", str(value), flag)


def _options(recipe: Mapping[str, Any], assistant: Any) -> Iterator[str]:
    """The options of the builder that are keys of a recipe."""
    metrics = [f"{term['name']}={term['weight']:g}" for term in recipe.get("reward", {}).get("metrics", [])]
    models = {role: recipe.get("models", {}).get(role) for role in ("user", "judge")}
    options = {
        "task": recipe["task"]["name"],
        "out": recipe.get("run_dir"),
        "policy": spec(assistant) if isinstance(assistant, Mapping) and "model" in assistant else "…",
        **models,
        "metrics": ",".join(metrics) or None,
        **{name: recipe.get("futures", {}).get(name) for name in ("samples", "window")},
        **{name: recipe.get("episode", {}).get(name) for name in ("temperature", "max_tokens")},
    }
    for name, value in options.items():
        if value is not None:
            given = f"{value['url']}#{value['model']}" if isinstance(value, Mapping) else value
            yield f"--{name.replace('_', '-')} {shlex.quote(str(given))}"
