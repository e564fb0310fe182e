"""The site: every page is in the navigation, every link resolves, no page names a missing file; it builds.

The links are checked without mkdocs, so that the ordinary tests find a dead one. Where mkdocs is installed (the extra
`docs`), the strict build runs as well.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import DOCS, PAGES, ROOT, SITE_PAGES, anchors, prose, slug

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:upshot|tests|benchmarks|examples|recipes|docs)/[\w./-]+)`")
THEIRS = re.compile(r"^\| script \| `[^`]+`", re.MULTILINE)
"""A script of an original in docs/migrate.md; verl, too, has a folder `examples`."""


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without constructing the Python objects that it names."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def nav_pages(part: Any) -> Iterator[str]:
    """The files in a part of the navigation."""
    if isinstance(part, str):
        yield part
        return
    for inner in part.values() if isinstance(part, dict) else part:
        yield from nav_pages(inner)


def settings() -> dict[str, Any]:
    """mkdocs.yml."""
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def test_every_page_is_in_the_nav_once_and_every_page_of_the_nav_exists() -> None:
    named = list(nav_pages(settings()["nav"]))
    there = [str(page.relative_to(DOCS)) for page in SITE_PAGES]
    forgotten = sorted(set(there) - set(named))
    assert not forgotten, f"not in the nav of mkdocs.yml: add a line such as '- Title: {forgotten[0]}' for {forgotten}"
    assert sorted(set(named) - set(there)) == [], "the nav of mkdocs.yml names pages that are gone"
    assert len(named) == len(set(named)), "a page stands in the nav of mkdocs.yml twice"


def test_the_site_loads_nothing_from_elsewhere() -> None:
    config = settings()
    assert config["theme"]["font"] is False and config["plugins"] == ["search"]
    named = [*config.get("extra_css", []), *config.get("extra_javascript", [])]
    assert [name for name in named if name.startswith("http") or not (DOCS / name).is_file()] == []
    assert [page.name for page in SITE_PAGES if re.search(r"!\[[^\]]*\]\(https?:", page.read_text())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_resolves(page: Path) -> None:
    dead = [link for link in LINK.findall(prose(page)) if not leads_somewhere(page, link)]
    assert dead == [], f"{page.relative_to(ROOT)}: no such file or heading"


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether a link's file exists (for pages of the site inside docs/), and its heading too; nothing is fetched."""
    if link.startswith(("https://", "mailto:")):
        return True
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    inside = DOCS in target.parents or DOCS not in page.parents
    return inside and target.exists() and (not anchor or (target.suffix == ".md" and anchor in anchors(target)))


def test_headings_become_the_anchors_that_github_makes() -> None:
    assert slug("On this machine: `--local`") == "on-this-machine---local"
    assert slug("From λ to weights") == "from-λ-to-weights"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_project_file_that_a_page_names_exists(page: Path) -> None:
    ours = THEIRS.sub("", page.read_text())
    assert [name for name in NAMED.findall(ours) if not (ROOT / name).exists()] == []


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs the extra: pip install -e '.[docs]'")
def test_the_site_builds_strictly_and_offline(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?(https?://[^\"'> ]+)")
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(SITE_PAGES) - 1
    assert {page.name: loaded.findall(page.read_text()) for page in pages if loaded.search(page.read_text())} == {}
    spilled = re.compile(r"<(p|li)>(?:(?!</\1>).)*?\n(?:- |\d+\. |\| )", re.DOTALL)
    torn = [page.name for page in pages if spilled.search(page.read_text())]
    assert torn == [], "lists or tables there come out as plain text: the site indents by four spaces"


def test_no_page_says_to_install_upshot_by_name_from_pypi() -> None:
    """On PyPI the name belongs to another project, so users install from the repository."""
    said = re.compile(r"pip install (?:-\S+ )*['\"]?upshot\b")
    files = [*PAGES, *sorted((ROOT / "upshot").rglob("*.py"))]
    warned = "Do not `pip install upshot`"
    assert [str(file) for file in files if said.search(file.read_text().replace(warned, ""))] == []
