"""Prompt templates: files beside this one, or your own by path. Jinja, imported at the first rendering."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from upshot.core.errors import UserError, did_you_mean
from upshot.core.files import read_text

FOLDER = Path(__file__).parent / "prompts"


def render(name: str, **values: Any) -> str:
    """The text of a template: a name such as `user` or the path of a file that ends in .j2."""
    return _compile(name).render(**values).strip()


def template_source(name: str) -> str:
    """The unrendered text of a template."""
    path = Path(name) if name.endswith(".j2") else FOLDER / f"{name}.j2"
    if not path.is_file():
        known = [file.stem for file in FOLDER.glob("*.j2")]
        raise UserError(f"no prompt template '{name}'; {did_you_mean(name, known)} (your own: a path ending in .j2)")
    return read_text(path, "prompt template")


@lru_cache(maxsize=64)
def _compile(name: str) -> Any:
    from jinja2 import Environment, StrictUndefined

    # Values are data, never templates: nothing a model says is rendered a second time.
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    return environment.from_string(template_source(name))
