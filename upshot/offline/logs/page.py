"""`logs.html`: what was read, signs and outcomes, validity, telling conversations; no script, no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from upshot.core.files import write_atomic
from upshot.offline.logs.read import LoggedConversation
from upshot.run.report.page import read_asset

SIZE, EDGE = 260, 30
"""Of the calibration plot, in pixels."""
MAX_TEXT = 1500


def spread(found: Mapping[str, float] | None) -> str:
    """A mean with its interval, for a reader."""
    return f"{found['value']:.3g} ({found['low']:.3g} to {found['high']:.3g})" if found else "–"


def sign_rows(survey: Mapping[str, Any]) -> list[list[str]]:
    """The rows of the table of signs: how often, and the outcome with and without."""
    return [
        [name, *(spread(own[key]) for key in ("share", "with", "without"))] for name, own in survey["signs"].items()
    ]


def write_page(
    path: Path,
    survey: Mapping[str, Any],
    account: Sequence[str],
    telling: Sequence[LoggedConversation],
    validity: Mapping[str, Any] | None = None,
) -> None:
    """Write the page, whole or not at all."""
    facts = [["conversations", f"{survey['conversations']:,}"], ["outcome", spread(survey["outcome"])]]
    facts += [[name, spread(own)] for name, own in survey["sizes"].items()]
    facts.append(["languages", ", ".join(f"{name} {count:,}" for name, count in survey["languages"].items())])
    parts = [_table("What was read", ["", "mean (95 % interval)"], facts)]
    if account:
        parts.append(
            _card(
                "Left out, noted, masked",
                f"<ul class=notes>{''.join(f'<li>{escape(line)}</li>' for line in account)}</ul>",
            )
        )
    if validity:
        parts.append(_validity(validity))
    parts.append(_table("Signs", ["", "share", "outcome with it", "outcome without"], sign_rows(survey)))
    if len(survey["kinds"]) > 1:
        kinds = [[name or "(none)", spread(own), f"{own['n']:,}"] for name, own in survey["kinds"].items()]
        parts.append(_table("Kinds of conversations", ["", "outcome", "conversations"], kinds))
    parts += [_conversation(talk) for talk in telling]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><meta name="viewport" content="width=device-width"><title>logs</title>'
        f"<style>{read_asset('page.css')}</style></head><body><div id=page><header><span class=brand>Upshot</span>"
        f"<h1>logs</h1></header>{''.join(parts)}</div></body></html>"
    )
    write_atomic(path, page.encode("utf-8", "replace"))


def _validity(validity: Mapping[str, Any]) -> str:
    rows = [
        [name, *(spread(own[key]) for key in ("concordance", "length"))] for name, own in validity["groups"].items()
    ]
    head = ["held-out replies", "right order by simulation", "by length alone"]
    table = f"<div class=scroll>{_rows(head, rows)}</div>"
    return _card("Validity", f"<p><b>{escape(validity['text'])}</b></p>{_plot(validity['calibration'])}{table}")


def _plot(bins: Iterable[Mapping[str, float]]) -> str:
    """Simulated score against the share of good outcomes; on the diagonal the simulation is calibrated."""
    room = SIZE - 2 * EDGE

    def at(x: float, y: float) -> str:
        return f"{EDGE + room * x:.1f},{SIZE - EDGE - room * y:.1f}"

    marks = ""
    for own in bins:
        x, y = at(own["simulated"], own["real"]).split(",")
        low, high = (at(0, own[key]).split(",")[1] for key in ("low", "high"))
        marks += f'<line x1="{x}" x2="{x}" y1="{low}" y2="{high}" class=reach />'
        marks += f'<circle cx="{x}" cy="{y}" r="4" fill="currentColor"/>'
    return (
        f'<svg width="{SIZE}" height="{SIZE}" class=plot role=img aria-label="calibration">'
        f'<polyline points="{at(0, 1)} {at(0, 0)} {at(1, 0)}" class=curve stroke="currentColor"/>'
        f'<polyline points="{at(0, 0)} {at(1, 1)}" class=gap stroke="currentColor" stroke-dasharray="3 3"/>{marks}'
        f'<text x="{EDGE}" y="{SIZE - 8}">simulated score, 0 to 1</text>'
        f'<text x="4" y="{EDGE - 10}">share of good outcomes, 0 to 1</text></svg>'
    )


def _conversation(talk: LoggedConversation) -> str:
    outcome = "no outcome" if talk.outcome is None else f"outcome {talk.outcome:g}"
    said = "".join(
        f"<dt>{escape(message.name or message.role)}</dt><dd>{escape(message.content[:MAX_TEXT])}</dd>"
        for message in talk.messages
    )
    return _card(f"{outcome}: {talk.place}", f"<dl class=pairs>{said}</dl>")


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return _card(title, f"<div class=scroll>{_rows(head, rows)}</div>")


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _card(title: str, content: str) -> str:
    return f"<section class=card><h2>{escape(title)}</h2>{content}</section>"
