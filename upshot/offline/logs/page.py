"""`logs.html`: what was read, signs and outcomes, validity, telling conversations. What it looks like: `page.j2`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from upshot.core.files import write_atomic
from upshot.offline.logs.read import LoggedConversation
from upshot.run.report.page import read_asset


def spread(found: Mapping[str, float] | None) -> str:
    """A mean with its interval, for a reader."""
    return f"{found['value']:.3g} ({found['low']:.3g} to {found['high']:.3g})" if found else "–"


def columns(rows: Mapping[str, Mapping[str, Any]], *keys: str) -> list[list[str]]:
    """Rows of a table: the name, and the means under some keys."""
    return [[name, *(spread(own[key]) for key in keys)] for name, own in rows.items()]


def sign_rows(survey: Mapping[str, Any]) -> list[list[str]]:
    """The rows of the table of signs: how often, and the outcome with and without."""
    return columns(survey["signs"], "share", "with", "without")


def write_page(
    path: Path,
    survey: Mapping[str, Any],
    account: Sequence[str],
    telling: Sequence[LoggedConversation],
    validity: Mapping[str, Any] | None = None,
) -> None:
    """Write the page, whole or not at all."""
    from jinja2 import Environment

    facts = [["conversations", f"{survey['conversations']:,}"], ["outcome", spread(survey["outcome"])]]
    facts += [[name, spread(own)] for name, own in survey["sizes"].items()]
    facts.append(["languages", ", ".join(f"{name} {count:,}" for name, count in survey["languages"].items())])
    kinds = [[name or "(none)", spread(own), f"{own['n']:,}"] for name, own in survey["kinds"].items()]
    shown: dict[str, Any] = {
        "facts": facts,
        "account": account,
        "signs": sign_rows(survey),
        "kinds": kinds,
        "telling": telling,
    }
    if validity:
        shown |= {"validity": validity, "validity_rows": columns(validity["groups"], "concordance", "length")}
    template = Environment(autoescape=True).from_string((files("upshot.offline.logs") / "page.j2").read_text("utf-8"))
    write_atomic(path, template.render(**shown, style=read_asset("page.css")).encode("utf-8", "replace"))
