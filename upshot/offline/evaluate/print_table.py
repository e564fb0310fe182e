"""The table for people (rich), for papers (Markdown) and for programs (JSON)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from upshot.offline.evaluate.cells import Cell, Column
from upshot.offline.evaluate.statistics import Estimate

if TYPE_CHECKING:
    from rich.console import Console

Cells = Mapping[str, Sequence[Cell]]
NOTE = (
    "mean [95 % interval over goals: bootstrap, Wilson for scores of 0 and 1]; p: paired sign-flip test against the "
    "first row, two-sided, * p < 0.05, ** p < 0.01 (not corrected for the number of comparisons)"
)


def cell_text(cell: Cell) -> str:
    """'46.0 [40.1, 52.3] p=0.031*', with what is missing behind it."""
    absent = sum(cell.missing.values())
    tail = f" ({absent} missing)" if absent else ""
    if cell.estimate is None:
        return f"–{tail}"
    found = cell.estimate
    text = f"{_short(found.mean)} [{_short(found.low)}, {_short(found.high)}]"
    if cell.difference is not None:
        p = cell.difference.p_value
        text += f" p{'<0.001' if p < 0.001 else f'={p:.3f}'}{'**' if p < 0.01 else '*' if p < 0.05 else ''}"
    return text + tail


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def missing_lines(columns: Sequence[Column], cells: Cells) -> list[str]:
    """What is missing, by model and reason; columns that miss the same conversations are not listed twice."""
    counts: Counter[tuple[str, str]] = Counter()
    for model, own in cells.items():
        for column, cell in zip(columns, own, strict=True):
            for reason, count in cell.missing.items():
                if column.group is None:
                    counts[model, reason] = max(counts[model, reason], count)
    return [f"{model}: {count} × {reason}" for (model, reason), count in counts.most_common()]


def markdown(columns: Sequence[Column], cells: Cells) -> str:
    """The table as Markdown."""
    head = ["", *(column.title for column in columns)]
    rows = [[model, *(cell_text(cell) for cell in own)] for model, own in cells.items()]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    missing = "".join(f"- missing: {line}\n" for line in missing_lines(columns, cells))
    return f"{table}\n\n{NOTE}\n" + (f"\n{missing}" if missing else "")


def print_rich(title: str, columns: Sequence[Column], cells: Cells, console: Console) -> None:
    """The table on a terminal."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column.title)
    for model, own in cells.items():
        table.add_row(model, *(cell_text(cell) for cell in own))
    console.print(table)
    console.print(NOTE, style="dim")
    for line in missing_lines(columns, cells):
        console.print(f"missing: {line}", style="yellow", highlight=False)


def to_dict(title: str, columns: Sequence[Column], cells: Cells) -> dict[str, Any]:
    """`table.json`: the printed table (`columns`, `rows`), and every number behind it (`cells`)."""
    return {
        "title": title,
        "columns": ["", *(column.title for column in columns)],
        "rows": [[model, *(cell_text(cell) for cell in own)] for model, own in cells.items()],
        "note": NOTE,
        "cells": {
            model: {column.title: _cell_dict(cell) for column, cell in zip(columns, own, strict=True)}
            for model, own in cells.items()
        },
    }


def _cell_dict(cell: Cell) -> dict[str, Any]:
    out: dict[str, Any] = {"missing": dict(cell.missing)}
    if cell.estimate is not None:
        out |= _estimate_dict(cell.estimate)
    if cell.difference is not None:
        out["difference"] = {**_estimate_dict(cell.difference.estimate), "p": cell.difference.p_value}
    return out


def _estimate_dict(found: Estimate) -> dict[str, Any]:
    return {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n}
