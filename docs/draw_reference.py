"""Writes docs/reference.md and recipes/schema.json: every key of a recipe, from `config/recipe/` and its docstrings.

python docs/draw_reference.py
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from upshot.config.model_spec import ModelSpec
from upshot.config.recipe import Named, Recipe
from upshot.config.validation import models_in

DOCS = Path(__file__).resolve().parent
HEAD = """\
# Every key of a recipe

Generated from the schema by `python docs/draw_reference.py`; a test keeps it current. `upshot recipe show
NAME` prints a recipe with all its values and where each comes from. `recipes/schema.json` gives your editor the same
information (`# yaml-language-server: $schema=…` as the first line of a recipe).

**A recipe is a YAML file.** Keys that it does not set have the defaults below. An unknown key, a key that appears twice
or a value of the wrong type is refused; the message names it and says what to do.

**`extends`** (a name, a path, or a list of them) applies the file on top of others: mappings are merged key by key,
everything else is replaced. Options of a named thing are inherited only while its `name` stays the same: a recipe that
names a different task starts with that task's defaults.

**Overrides** on the command line take precedence over files: `upshot train RECIPE train.lr=1e-5
reward.metrics.accuracy.weight=2`. A section may be given in its short form (`train.kl=0.1`, `credit: turns`); later
overrides of its other keys keep that value. Items of a list are named by position or by their `name`. Values are YAML.
In Python: `upshot.load("RECIPE", train={"lr": 1e-5})`.

**A named thing** (`task`, `futures`, `futures.user`, a metric, `reward.manager`, `train.advantage`) is a string or a
mapping with `name`. The other keys of the mapping are options of its constructor; their names, types and bounds are
checked. The name is a built-in one, or `my_pkg.module:Thing` for your own code ([own-task.md](own-task.md)). Upshot
fills in a constructor's parameter called `task`, `judge`, `tokenizer`, `models` or `sandbox`.

**A model** under `models` is a string (a URL with `#name`, `provider/model`, a folder, `policy`, `policy@start`,
`scripted:…`) or a mapping with the keys at the end of this page ([models.md](models.md)).
"""
YAML_TYPES: dict[Any, str] = {str: "text", int: "whole number", float: "number", Any: "anything"}
YAML_TYPES |= {bool: "true or false", type(None): "null"}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, model, note in sections():
        parts.append(f"\n## {title}\n\n{note}\n\n| key | type | default | |\n|---|---|---|---|\n{_rows(title, model)}")
    return "".join(parts)


def sections() -> Iterator[tuple[str, type[BaseModel], str]]:
    """Title, model and description of each part, in the order of the recipe."""
    yield "top level", Recipe, "One training setting."
    yield from _inner("", Recipe)
    yield "models.NAME", ModelSpec, first_line(ModelSpec)


def _inner(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel], str]]:
    for name, field in model.model_fields.items():
        for inner in models_in(field.annotation):
            if inner in (Named, ModelSpec):
                continue
            title = f"{prefix}{name}" + (".N" if typing.get_origin(field.annotation) is list else "")
            yield title, inner, first_line(inner)
            yield from _inner(f"{title}.", inner)


def _rows(title: str, model: type[BaseModel]) -> str:
    prefix = "" if title == "top level" else f"{title}."
    return "".join(
        f"| `{prefix}{name}` | {_type(field.annotation)} | {_default(field)} | {_description(field)} |\n"
        for name, field in model.model_fields.items()
    )


def _type(annotation: Any) -> str:
    """An annotation in the words of YAML."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a named thing" if annotation is Named else "a model" if annotation is ModelSpec else "section"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return _cell(" ".join(f"`{value}`" for value in arguments))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(part) for part in arguments)
    if origin in (list, tuple):
        return "list of " + _type(next(iter(arguments), Any))
    if origin is dict:
        return f"mapping to {_type(arguments[1])}"
    if origin is typing.Annotated:
        return _type(arguments[0])
    return YAML_TYPES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*needed*"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Named):
        return f"`{value.name}`"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        return f"`[{', '.join(str(getattr(item, 'name', item)) for item in value)}]`"
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if value != "" else "`''`"


def first_line(model: type[BaseModel]) -> str:
    """The first paragraph of a model's docstring, on one line."""
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _description(field: FieldInfo) -> str:
    """A field's docstring for readers of YAML, where None is null."""
    return _cell(re.sub(r"\bNone\b", "null", field.description or ""))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    (DOCS / "reference.md").write_text(page(), encoding="utf-8")
    (DOCS.parent / "recipes" / "schema.json").write_text(json.dumps(Recipe.model_json_schema(), indent=2) + "\n")
    print("written: docs/reference.md, recipes/schema.json")
