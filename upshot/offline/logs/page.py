"""`logs.html`: what was read, signs and outcomes, validity, the most telling conversations (template: `page.j2`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from upshot.core.files import write_atomic
from upshot.run.report.page import read_asset

FEWEST = 10
"""With fewer conversations, nothing is called better or worse."""


def spread(mean: Mapping[str, float] | None) -> str:
    """A mean with its interval, for a reader."""
    return "{value:.2f} ({low:.2f} to {high:.2f})".format(**mean) if mean else "–"


def side(sign: Mapping[str, Any]) -> str:
    """'better' or 'worse' if conversations with a sign and those without it have separate intervals of the outcome."""
    yes, no = sign["with"], sign["without"]
    if not yes or not no or min(yes["n"], no["n"]) < FEWEST:
        return ""
    return "worse" if yes["high"] < no["low"] else "better" if yes["low"] > no["high"] else ""


def counts(numbers: Mapping[str, int]) -> str:
    """The number of each, as text."""
    return ", ".join(f"{name} {count:,}" for name, count in numbers.items())


def write_page(path: Path, account: Sequence[str], **shown: Any) -> None:
    """Write the page, whole or not at all. shown: `survey`, `telling` conversations and `validity`, if it is known."""
    from jinja2 import Environment

    pages = Environment(autoescape=True)
    pages.filters |= {"spread": spread, "side": side, "counts": counts}
    template = pages.from_string((files("upshot.offline.logs") / "page.j2").read_text("utf-8"))
    page = template.render(account=account, style=read_asset("page.css"), **shown)
    write_atomic(path, page.encode("utf-8", "replace"))
