"""The table of docs/migrate.md says nothing that is not so: keys, commands, metrics and conversions are all there."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from upshot.cli import VERBS, make_parser
from upshot.config.load import find_recipe
from upshot.config.recipe import FuturesConfig, Named, Recipe
from upshot.config.registry import option_types
from upshot.config.validation import model_at
from upshot.offline.migrate.recipe import CONVERSIONS, MappingLine, originals, page
from upshot.rewards.build import check_metric
from upshot.rollout.dependencies import NAMES
from upshot.rollout.futures.base import kinds
from upshot.tasks.base import tasks

ROOT = Path(__file__).parents[3]
LINES = [(name, line) for name, original in originals().items() for line in original.lines]


def those(field: str) -> list[Any]:
    return [pytest.param(line, id=f"{name}: {line.theirs}") for name, line in LINES if getattr(line, field)]


def test_the_page_is_made_of_the_table() -> None:
    assert (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8") == page()


def test_every_line_says_one_thing_about_one_name() -> None:
    for name, line in LINES:
        assert sum(map(bool, (line.key, line.command, line.metric, line.reason))) == 1, (name, line.theirs)
        assert line.kind in ("script", "flag", "key", "metric", "file", "variable")
    names = [(name, line.kind, line.theirs) for name, line in LINES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("line", those("key"))
def test_every_key_is_one_of_the_recipe(line: MappingLine) -> None:
    *parents, last = line.key.split(".")
    section = model_at(Recipe, parents)
    assert section is not None and issubclass(section, BaseModel), line.key
    if last not in section.model_fields and issubclass(section, Named):  # an option of whatever is named
        thing = kinds.get("classmates") if issubclass(section, FuturesConfig) else tasks.get("math-hard")
        assert last in option_types(thing), line.key
    else:
        assert last in section.model_fields, line.key
    assert not line.how or line.how in CONVERSIONS


@pytest.mark.parametrize("line", those("metric"))
def test_every_metric_is_there(line: MappingLine) -> None:
    options = {"model": "x"} if line.metric == "rm_score" else {}
    check_metric(line.metric, options, "", **dict.fromkeys(NAMES))


@pytest.mark.parametrize("line", those("command"))
def test_every_command_and_its_flags_are_there(line: MappingLine) -> None:
    program, verb, *words = shlex.split(line.command)
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
