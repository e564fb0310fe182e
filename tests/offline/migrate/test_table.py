"""The table of docs/migrate.md is true: its keys, commands, metrics and conversions all exist."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.option_types import option_types
from upshot.cli import VERBS, make_parser
from upshot.config.load import find_recipe
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import FuturesConfig, Named, Recipe
from upshot.config.validation import model_at
from upshot.offline.migrate.recipe import CONVERSIONS, read_table
from upshot.rewards.build import check_metric
from upshot.rollout.dependencies import NAMES
from upshot.rollout.futures.talk import kinds
from upshot.tasks.base import tasks
from upshot.tasks.participants.base import users

ROOT = Path(__file__).parents[3]
LINES = [(name, line) for name, original in read_table()["originals"].items() for line in original["rows"]]
FIELDS = {
    "theirs",
    "kind",
    "key",
    "command",
    "metric",
    "reason",
    "note",
    "how",
    "values",
    "unless",
    "set",
    "value",
    "learns",
}
"""Rows of every original; conversions and scripts also have a few of their own."""
OF_CONVERSIONS = {"flags", "names", "sampling", "samples"}
OF_SCRIPTS = {"keys", "defaults", "options", "make"}


def those(field: str) -> list[Any]:
    return [pytest.param(line, id=f"{name}: {line['theirs']}") for name, line in LINES if field in line]


def test_the_page_is_generated_from_the_table() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "draw_migrate.py"))["page"]()
    assert (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8") == page


def test_every_line_says_one_thing_about_one_name() -> None:
    for name, line in LINES:
        assert sum(field in line for field in ("key", "command", "metric", "reason")) == 1, (name, line["theirs"])
        assert line["kind"] in ("script", "flag", "key", "metric", "file", "variable")
        more = OF_SCRIPTS if line["kind"] == "script" else OF_CONVERSIONS if "how" in line else set()
        assert line.keys() <= FIELDS | more, (name, line["theirs"])
        assert "how" not in line or line["how"] in CONVERSIONS, line["how"]
    names = [(name, line["kind"], line["theirs"]) for name, line in LINES]
    assert len(names) == len(set(names))
    assert {line.get("how") for _, line in LINES} - {None} == CONVERSIONS.keys()


def every_key() -> list[str]:
    """Every recipe key that the table can set."""
    keys = {key for _, line in LINES for field in ("keys", "set") for key in line.get(field, {})}
    keys |= {line["key"] for _, line in LINES if "key" in line}
    valued = [own for _, line in LINES for own in line.get("values", {}).values() if isinstance(own, dict)]
    return sorted(keys.union(*valued))


@pytest.mark.parametrize("key", every_key())
def test_every_key_in_the_table_is_a_recipe_key(key: str) -> None:
    *parents, last = key.split(".")
    section = ModelSpec if parents[:1] == ["models"] and len(parents) > 1 else model_at(Recipe, parents)
    if parents == ["models"]:  # a helper model's name
        return
    assert section is not None and issubclass(section, BaseModel), key
    if last not in section.model_fields and issubclass(section, Named):  # an option of a registered class
        named = {"task": tasks.get("math-hard"), "futures.user": users.get("llm")}
        thing = kinds.get("classmates") if issubclass(section, FuturesConfig) else named[".".join(parents)]
        assert last in option_types(thing), key
    else:
        assert last in section.model_fields, key


@pytest.mark.parametrize("line", those("metric"))
def test_every_metric_in_the_table_exists(line: dict[str, Any]) -> None:
    options = {"model": "x"} if line["metric"] == "rm_score" else {}
    check_metric(line["metric"], options, "", **dict.fromkeys(NAMES))


def test_every_task_in_the_table_exists() -> None:
    for options in read_table()["tasks"].values():
        if options is not None:
            own = {key.removeprefix("task."): value for key, value in options.items()}
            tasks.check(own.pop("name"), own, "task")


@pytest.mark.parametrize("line", those("command"))
def test_every_command_and_flag_in_the_table_exists(line: dict[str, Any]) -> None:
    program, verb, *words = shlex.split(line["command"])
    words += [word for option in line.get("options", {}).values() for word in option.split()]
    assert program == "upshot" and verb in VERBS
    if verb == "train" and words and not words[0].startswith("-"):
        find_recipe(words[0])
    parser = make_parser([verb])
    known = set()
    stack: list[Any] = [parser]
    while stack:
        for action in stack.pop()._actions:
            known |= set(action.option_strings)
            if isinstance(action.choices, dict):
                stack += list(action.choices.values())
    assert [word for word in words if word.startswith("--") and word not in known] == []
