"""A script of theirs that builds data (`scripts.engine.build_dataset`) as the line of `upshot data build`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from upshot.offline.migrate.carry import ImportedRecipe, carry
from upshot.offline.migrate.people import spec
from upshot.offline.migrate.table import originals
from upshot.offline.migrate.theirs import OriginalSettings

BUILD = "upshot data build"
DEFAULTS = {
    "--train_size": 500,
    "--num_candidate_responses": 2,
    "--proact_prompt_ratio": 0.5,
    "--add_system_prompt_ratio": 0,
}
"""What their builder takes for granted and ours does not."""


def builds(theirs: OriginalSettings) -> bool:
    """Whether their script builds data and trains nothing."""
    return re.split(r"[./]", theirs.program.removesuffix(".py"))[-1] == "build_dataset"


def build_line(theirs: OriginalSettings) -> tuple[str, ImportedRecipe]:
    """The command, and what it could not carry."""
    theirs = OriginalSettings(theirs.program, DEFAULTS | theirs.settings)
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
    models, futures, sampling = recipe.get("models", {}), recipe.get("futures", {}), recipe.get("episode", {})
    metrics = [f"{term['name']}={term['weight']:g}" for term in recipe.get("reward", {}).get("metrics", [])]
    policy = spec(assistant) if isinstance(assistant, Mapping) and "model" in assistant else "…"
    options = {
        "--task": recipe["task"]["name"],
        "--out": recipe.get("run_dir"),
        "--policy": policy,
        "--user": models.get("user"),
        "--judge": models.get("judge"),
        "--metrics": ",".join(metrics) or None,
        "--samples": futures.get("samples"),
        "--rounds": futures.get("rounds"),
        "--temperature": sampling.get("temperature"),
        "--max-tokens": sampling.get("max_tokens"),
    }
    for name, value in options.items():
        if value is not None:
            given = f"{value['url']}#{value['model']}" if isinstance(value, Mapping) else value
            yield f"{name} {shlex.quote(str(given))}"
