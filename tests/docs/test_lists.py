"""Pages that list what the code has: alarms and missing reasons have advice, extras have a line, listed files exist."""

from __future__ import annotations

import re
import tomllib

from tests.docs.pages import DOCS, ROOT
from upshot.core.score import Reason
from upshot.training.metrics.alarms import ALARMS

TROUBLE = (DOCS / "troubleshooting.md").read_text()


def first_column(text: str) -> set[str]:
    """What is in backticks in the first column of a page's tables."""
    rows = re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE)
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row)}


def test_every_alarm_has_a_line_in_troubleshooting() -> None:
    assert {alarm.metric for alarm in ALARMS} - first_column(TROUBLE) == set()


def test_every_reason_of_a_missing_score_has_a_line_in_troubleshooting() -> None:
    assert {str(reason) for reason in Reason} - first_column(TROUBLE) == set()


def test_every_extra_has_a_line_on_the_start_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"dev"}
    assert extras - first_column((DOCS / "index.md").read_text()) == set()


def test_every_room_and_file_of_the_file_tree_exists() -> None:
    text = (DOCS / "design.md").read_text()
    tree = text[text.index("## The file tree") : text.index("## How a step runs")]
    rooms = re.split(r"^ {6}(\w+)/ ", tree, flags=re.MULTILINE)[1:]
    named = dict(zip(rooms[::2], rooms[1::2], strict=True))
    there = {path.name for path in (ROOT / "upshot").iterdir() if (path / "__init__.py").exists()}
    assert set(named) == there
    for room, words in named.items():
        own = words.partition("\n    recipes/")[0]
        files = {path.name for path in (ROOT / "upshot" / room).rglob("*.py")}
        assert set(re.findall(r"\b(\w+\.py)\b", own)) - files == set(), room
