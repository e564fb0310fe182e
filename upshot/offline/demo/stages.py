"""Shared by the demonstrations: a stage of training in its own folder, and the table at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.config.load import dump_recipe, load_recipe
from upshot.config.recipe import Recipe
from upshot.run.console import make_reporter
from upshot.run.folder import free_place


class Demonstration:
    """Where a demonstration writes, and how it prints."""

    def __init__(self, name: str, recipe: Recipe, quiet: bool, as_json: bool) -> None:
        """The demonstration writes to the recipe's run folder, or else to a new one."""
        self.root = Path(recipe.run_dir) if recipe.run_dir else free_place(name)
        self.quiet, self.as_json = quiet or as_json, as_json
        self.started = time.monotonic()

    def tell(self, text: str) -> None:
        """Print a line, unless quiet."""
        if not self.quiet:
            print(text, flush=True)

    def recipe_of(
        self, recipe: Recipe, name: str, folder: str, changes: Mapping[str, Any], start: Path | None = None
    ) -> Recipe:
        """The recipe of one stage, in its own folder, with `changes` (by section or section.field).

        With `start`, the stage begins with that checkpoint and has no warm start.
        """
        place = {"run_dir": self.root / folder, "name": name}
        begin = {} if start is None else {"warm_start": None, "model.path": start}
        return load_recipe(recipe.model_dump(), {**place, **begin, **changes}).recipe

    def train(
        self, recipe: Recipe, name: str, folder: str, changes: Mapping[str, Any], start: Path | None = None
    ) -> Path:
        """Train one stage in this process and return its last checkpoint."""
        return train_stage(self.recipe_of(recipe, name, folder, changes, start), self.quiet)

    def finish(self, recipe: Recipe, table: dict[str, Any], strong: str, last: str = "") -> int:
        """Show the table, with one row in bold; write it and, when it can be read already, the report."""
        from upshot.run.report.report import write_report

        table["winner"] = strong
        table["note"] += f" {time.monotonic() - self.started:.0f} s in all."
        (self.root / "table.json").write_text(json.dumps(table, indent=2))
        (self.root / "recipe.yaml").write_text(dump_recipe(recipe))
        if self.as_json:
            print(json.dumps(table), flush=True)
        else:
            _print_table(table, strong)
        page = write_report(self.root)
        if not self.as_json:
            print(f"\nreport  {page}{last}")
        return 0


def train_stage(recipe: Recipe, quiet: bool) -> Path:
    """The last checkpoint of a recipe, trained to its end."""
    from upshot.run.run import train

    latest = train(recipe, None, make_reporter(quiet)).latest()
    assert latest is not None
    return latest.path


def _print_table(table: dict[str, Any], strong: str) -> None:
    from rich.console import Console
    from rich.table import Table

    headings = [column.replace(", ", "\n") for column in table["columns"]]
    shown = Table(*headings, title=table["title"], caption=table["note"], padding=(0, 1), collapse_padding=True)
    for name, *cells in table["rows"]:
        texts = [c if isinstance(c, str) else f"{c['value']:.2f}\n[dim]{c['low']:.2f}–{c['high']:.2f}" for c in cells]
        shown.add_row(f"[bold]{name}" if name == strong else name, *texts)
    Console().print(shown)


def mean_cell(values: Sequence[float | None]) -> Any:
    """A cell of the mean and the range over runs; a dash where there is nothing."""
    present = [value for value in values if value is not None]
    return {"value": sum(present) / len(present), "low": min(present), "high": max(present)} if present else "–"
