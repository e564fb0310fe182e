"""docs/api.md is generated from the code and lists everything public; the help of the calls is readable text."""

from __future__ import annotations

import inspect
import runpy

import pytest

import upshot
from tests.docs.pages import DOCS

PAGE = (DOCS / "api.md").read_text()


def test_the_page_is_written_from_signatures_docstrings_and_examples() -> None:
    assert runpy.run_path(str(DOCS / "draw_api.py"))["page"]() == PAGE, "run: python docs/draw_api.py"


def test_every_public_name_is_on_the_page() -> None:
    assert [name for name in upshot.__all__ if not name.startswith("_") and f"upshot.{name}" not in PAGE] == []


@pytest.mark.parametrize("function", [upshot.load, upshot.train, upshot.reward], ids=lambda one: one.__name__)
def test_the_help_of_a_call_explains_each_of_its_arguments(function: object) -> None:
    doc = inspect.getdoc(function) or ""
    own = [p for p in inspect.signature(function).parameters.values() if repr(p.default) != "…"]  # type: ignore[arg-type]
    assert all(f"{p.name}: " in doc or p.name in ("options", "overrides") for p in own), doc


def test_the_signature_of_train_lists_the_sections_of_a_recipe_without_a_wall_of_types() -> None:
    line = str(inspect.signature(upshot.train))
    assert "reward=…" in line and "Mapping" not in line and len(line) < 400
