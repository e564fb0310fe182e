"""The structure: imports point down, there are no cycles, class names are unique, folders stay small.

All imports of a file count, wherever they are: late imports and those for the type checker, too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "upshot"
FLOORS = [
    ["core"],
    ["config"],
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
"""The rooms, from the ground up."""
MOST_FILES = 20
FACES = {"upshot", "upshot.__main__"}
"""Modules that only pass names on: `import upshot` with its lazy names, and `python -m upshot`."""


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    """Every module, parsed once, by the first test that needs it rather than by every process that collects tests."""
    return {module: ast.parse(path.read_text()) for module, path in MODULES.items()}


def imports(module: str) -> Iterator[str]:
    """The modules of the package that a module imports."""
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from {name if name in MODULES else node.module for name in names} & MODULES.keys() - {module}
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & MODULES.keys() - {module}


@cache
def arrows() -> dict[str, set[str]]:
    """Which module imports which."""
    return {module: set(imports(module)) - FACES for module in MODULES if module not in FACES}


def floor(module: str) -> int | None:
    """The floor of a module's room; None for the package itself."""
    room = module.split(".")[1] if "." in module else ""
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that reach themselves, found by removing modules without remaining imports again and again."""
    left = {module: set(others) for module, others in arrows.items()}
    while ends := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in ends}
    while tops := left.keys() - set().union(*left.values(), set()):  # they import a cycle without being part of one
        left = {module: others for module, others in left.items() if module not in tops}
    return [sorted(left)] if left else []


def test_imports_between_rooms_point_down() -> None:
    up = [f"{a} → {b}" for a, others in arrows().items() for b in others if (floor(a) or 0) < (floor(b) or 0)]
    assert sorted(up) == []


def test_there_are_no_import_cycles() -> None:
    assert circles(arrows()) == []


def test_an_import_cycle_would_be_found() -> None:
    assert circles({"top": {"a"}, "a": {"b"}, "b": {"a", "end"}, "end": set()}) == [["a", "b"]]


def test_every_import_of_the_package_names_an_existing_module() -> None:
    """The type checker is configured to ignore missing modules, so it would ignore these, too."""
    named = {
        (module, node.module)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "upshot"
    }
    assert sorted((module, other) for module, other in named if other not in MODULES) == []


def test_every_room_has_a_floor() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == {room for rooms in FLOORS for room in rooms}
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_the_ground_imports_nothing_above_and_the_engine_only_core() -> None:
    for room, known in {"core": {"core"}, "engine": {"engine", "core"}, "sandbox": {"sandbox", "core"}}.items():
        own = [module for module in arrows() if module.startswith(f"upshot.{room}")]
        wrong = [f"{a} → {b}" for a in own for b in arrows()[a] if b.split(".")[1] not in known]
        assert sorted(wrong) == []


def test_a_folder_has_at_most_twenty_files() -> None:
    files = Counter(path.parent for path in MODULES.values())
    assert {str(folder.relative_to(PACKAGE)): count for folder, count in files.items() if count > MOST_FILES} == {}


def test_public_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_only_the_adapters_of_the_cluster_import_verl() -> None:
    """Anywhere in a file: no other module may require it."""
    imported = re.compile(r"^\s*(from|import) (verl|ray)\b", re.MULTILINE)
    inside = PACKAGE / "verl" / "adapters"
    wrong = [path for path in MODULES.values() if imported.search(path.read_text())]
    assert wrong and all(inside in path.parents for path in wrong)
