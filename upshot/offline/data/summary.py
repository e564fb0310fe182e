"""The summary of `data prepare` as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from upshot.offline.data.prepare import PrepareSummary

if TYPE_CHECKING:
    from rich.console import Console


def print_summary(summary: PrepareSummary, console: Console) -> None:
    """What was read, written and dropped, and why."""
    from rich.table import Table

    table = Table(title=f"data for {summary.purpose}", title_justify="left")
    table.add_column("")
    table.add_column("rows", justify="right")
    table.add_column("goals", justify="right")
    table.add_row("records read", f"{summary.read:,}", "")
    for split, rows in summary.rows.items():
        table.add_row(f"written to {split}", f"{rows:,}", f"{summary.goals[split]:,}")
    for reason, count in summary.dropped.most_common():
        table.add_row(f"dropped: {reason}", f"{count:,}", "", style="yellow")
    console.print(table)
    for file in summary.files:
        console.print(file, soft_wrap=True, highlight=False)
