"""docs/results.md says what the runs say, and has a line for every recipe."""

from __future__ import annotations

import runpy
from pathlib import Path

from upshot.config.load import RECIPES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results.md").read_text()


def test_tables_and_picture_are_made_of_the_runs() -> None:
    made = runpy.run_path(str(DOCS / "draw_results.py"))
    assert made["table"]() in PAGE and made["quickstart_table"]() in PAGE, "run: python docs/draw_results.py"
    assert (DOCS / "fall-and-hold.svg").read_text() == made["draw"](), "run: python docs/draw_results.py"


def test_every_recipe_has_a_line() -> None:
    lines = PAGE[PAGE.index("## Every recipe") :]
    for recipe in RECIPES.glob("*.yaml"):
        stem = recipe.stem.removesuffix("-medium").removesuffix("-bigcodebench")
        assert f"`{stem}`" in lines, recipe.stem
