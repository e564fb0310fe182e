"""Imports point downwards only: a room knows what is below it, never what is above."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "upshot"
FLOORS = [
    ["core"],
    ["config", "models.base"],
    ["engine", "sandbox"],
    ["models"],
    ["serving"],
    ["tasks"],
    ["rewards"],
    ["rollout"],
    ["training"],
    ["run"],
    ["api"],
    ["offline", "verl"],
    ["cli"],
]
"""From the ground up."""


def floor(module: str) -> int | None:
    """The floor of a module of the package; None for the package itself."""
    name = module.removeprefix("upshot").lstrip(".")
    found = [
        (len(room), number)
        for number, rooms in enumerate(FLOORS)
        for room in rooms
        if name == room or name.startswith(room + ".")
    ]
    return max(found)[1] if found else None


def imports(path: Path) -> list[str]:
    """What a file imports from the package when it is itself imported (type checkers' imports left out)."""
    found: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.startswith("upshot.")]


def test_no_file_imports_from_a_higher_floor() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        own = floor(module)
        for name in imports(path):
            other = floor(name)
            if own is not None and other is not None and other > own:
                wrong.append(f"{module} → {name}")
    assert wrong == []


def test_every_room_has_a_floor() -> None:
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert {room for room in rooms if floor(f"upshot.{room}") is None} == set()


def test_only_the_adapters_of_the_cluster_import_verl() -> None:
    """At any depth of a file: nobody else may need it installed."""
    imported = re.compile(r"^\s*(from|import) (verl|ray)\b", re.MULTILINE)
    inside = PACKAGE / "verl" / "adapters"
    wrong = [path for path in sorted(PACKAGE.rglob("*.py")) if imported.search(path.read_text())]
    assert wrong and all(inside in path.parents for path in wrong)
