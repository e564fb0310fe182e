"""CITATION.cff is valid as far as its readers check, and names this version."""

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_the_citation_file_has_the_required_fields_and_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited) and cited["type"] == "software"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert all("name" in author or "family-names" in author for author in cited["authors"])
    (paper,) = cited["references"]
    assert paper["type"] == "conference-paper" and len(paper["authors"]) == 10
