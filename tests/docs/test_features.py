"""The list of features names only what exists: files, tests, commands with their flags, recipe keys."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.support.option_types import option_types
from upshot.cli import VERBS, make_parser
from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import FuturesConfig, Named, Recipe
from upshot.config.validation import model_at
from upshot.offline.reproduce import list_papers
from upshot.rollout.futures.talk import kinds
from upshot.tasks.base import tasks

PAGE = (DOCS / "features.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| feature")
]
FOLDERS = ("tests/", "upshot/", "recipes/", "docs/")
THEIRS = re.compile(r"`[^`]*`")
SAID = ("scale: paper", "breakpoint()")
"""Neither a file nor a command nor a key: a setting inside an option, or a call in Python."""


def named(row: list[str]) -> list[str]:
    """Our names in a row; the first cell holds the original's."""
    return [text for cell in row[1:] for text in re.findall(r"`([^`]+)`", cell)]


NAMED = sorted({text for row in ROWS for text in named(row)})


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def flags_of(verb: str) -> set[str]:
    known: set[str] = set()
    stack: list[Any] = [make_parser([verb])]
    while stack:
        for action in stack.pop()._actions:
            known |= set(action.option_strings)
            if isinstance(action.choices, dict):
                stack += list(action.choices.values())
    return known


def is_key(key: str) -> bool:
    """Whether a dotted key, or an option of something that a recipe can name, exists."""
    parts = [part for part in key.split(".") if part not in ("N", "NAME")]
    if parts[0] == "models":
        return len(parts) == 1 or parts[1] in ModelSpec.model_fields
    if key.startswith("reward.metrics.N."):
        return parts[2] in ("name", "weight", "clamp", "tokens")
    section = Recipe if len(parts) == 1 else model_at(Recipe, parts[:-1])
    if section is None or parts[-1] in section.model_fields:
        return section is not None
    thing = kinds.get("classmates") if issubclass(section, FuturesConfig) else None
    options = [thing] if thing else [tasks.get(name) for name in ("math-hard", "judged", "mmlu-sycophancy")]
    return issubclass(section, Named) and any(parts[-1] in option_types(option) for option in options)


@pytest.mark.parametrize("text", NAMED)
def test_everything_named_exists(text: str) -> None:
    if text.startswith(FOLDERS):
        file, _, test = text.partition("::")
        assert (ROOT / file).exists()
        assert not test or test in names_in(file)
    elif text.startswith("upshot "):
        _, verb, *words = text.split()
        assert verb in VERBS
        assert [word for word in words if word.startswith("--") and word not in flags_of(verb)] == []
        if verb == "reproduce" and words and not words[0].startswith("-"):
            assert words[0] in list_papers()
    else:
        assert text in SAID or is_key(text), f"'{text}' is neither a file, a command nor a recipe key"


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_row_has_a_status_and_evidence(row: list[str]) -> None:
    assert len(row) == 3
    state = re.match(r"\*\*(works|differs|needs)\*\*: (.+)", row[2])
    assert state is not None
    assert state[1] != "works" or "`tests/" in row[2]
    assert state[1] == "works" or THEIRS.sub("", state[2]).strip(" ,;"), "a reason in words"


def test_the_page_counts_its_rows() -> None:
    count = Counter(row[2].split("**")[1] for row in ROWS)
    told = f"{len(ROWS)} rows: {count['works']} work, {count['differs']} differ, {count['needs']} need something."
    assert told in PAGE and len(ROWS) >= 185
