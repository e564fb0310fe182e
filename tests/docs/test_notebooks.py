"""The notebooks run from their first cell to their last, and their pages are generated from them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import upshot
from tests.docs.pages import DOCS

MADE: dict[str, Any] = runpy.run_path(str(DOCS / "draw_notebooks.py"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.py"))
SETTINGS = re.compile(r"^((?:[A-Z_]+, )+[A-Z_]+) = (\d[\d, ]+)$", re.MULTILINE)
"""The line of a notebook that says how long it takes."""
TINY = {"hidden": 16, "layers": 1, "heads": 2, "mlp": 32}
TRAIN = upshot.train


def train_less(recipe: Any, **settings: Any) -> upshot.runs.RunFolder:
    """`upshot.train` for the published recipe with smaller steps and a smaller model."""
    if not isinstance(recipe, str):
        return TRAIN(recipe, **settings)
    given = upshot.load(recipe, **settings)
    less: dict[str, Any] = {"train.prompts_per_step": 2, "reward.max_missing": 1.0}
    if given.train.samples:
        less["train.group_size"] = 2
    less["task.rows_per_split" if recipe == "quickstart" else "task.limit"] = 64
    if given.warm_start is not None:
        less["warm_start.batch"] = 4
    return TRAIN(given, **less, **({"model.tiny": TINY} if given.model.path is None else {}))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(upshot, "train", train_less)
    text = notebook.read_text()
    (line,) = SETTINGS.finditer(text)
    few = ", ".join("16" if name.strip() in ("ROWS", "SIZE") else "2" for name in line[1].split(","))
    said = list(MADE["run"](notebook.stem, MADE["cells"](text.replace(line[0], f"{line[1]} = {few}"))))
    assert sum(bool(output) for output in said) >= 3


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_of_a_notebook_has_its_words_and_its_code(notebook: Path) -> None:
    name, parts = notebook.stem, MADE["cells"](notebook.read_text())
    plain = MADE["render"](name, parts, [""] * len(parts)).rstrip("\n")
    page = (DOCS / "tutorials" / f"{name}.md").read_text()
    assert MADE["without_output"](page) == plain, f"run: python docs/draw_notebooks.py {name}"
    assert page.count("```text") >= 3, "what it printed is part of the page"
