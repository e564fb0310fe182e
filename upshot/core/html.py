"""Small pieces of HTML for notebooks, everything in them escaped. The report page has its own (`run/report`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def html_table(rows: Iterable[Sequence[Any]], head: Sequence[str] = ()) -> str:
    """Rows of plain values as a table; numbers are shortened, None is a dash."""
    lines = ["".join(f"<th style='text-align:left'>{escape(cell)}</th>" for cell in head)] if head else []
    lines += ["".join(f"<td style='text-align:left'>{escape(short(cell))}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def html_turns(turns: Iterable[tuple[str, str]]) -> str:
    """A paragraph for each turn: who said what."""
    style = "margin:2px 0;white-space:pre-wrap"
    return "".join(f"<div style='{style}'><b>{escape(who)}</b> {escape(text)}</div>" for who, text in turns)


def html_details(summary: str, inner: str) -> str:
    """A section that opens at a click; `inner` is HTML."""
    return f"<details><summary>{escape(summary)}</summary><div style='margin-left:1.5em'>{inner}</div></details>"


def short(value: Any) -> str:
    """A value as a table shows it."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
