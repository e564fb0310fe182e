"""Helpers of the tests in this folder that read the documentation pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
SITE_PAGES = sorted(DOCS.rglob("*.md"))
"""The pages of the site."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *SITE_PAGES]
"""All pages for readers: README, CONTRIBUTING and those of the site."""


def prose(page: Path) -> str:
    """A page without its code blocks: neither `#` nor `[…](…)` in them is Markdown."""
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Where links into a page may lead."""
    return {slug(heading) for heading in re.findall(r"^#{1,6} +(.+?)\s*$", prose(page), flags=re.MULTILINE)}
