"""Splitting asserts: a bare call for the program, and what outside of it must come of the call.

`assert CALL == LITERAL` is split where CALL is `f(…)` or `Solution(…).f(…)` and the arguments ask the program nothing:
no name in them is the program's. Then the program is shown its arguments and no more, and its answer is data. Every
other form is not split, above all nothing that computes with what a call gives (`sorted(f(1))`, `f(1)[0]`, `f(1) - 3`):
inside of the program's process a computation is the program's own.
"""

from __future__ import annotations

import ast
import builtins
import functools
from dataclasses import dataclass, replace
from typing import Any

from upshot.sandbox.inside.cases import parse

CACHED_LENGTH = 4096
LONGEST = 32_768
"""Characters of a test that is read here; a longer one is read in a run, on the run's own time."""
_RELATIONS: dict[type[ast.cmpop], str] = {ast.Eq: "eq", ast.NotEq: "ne", ast.Is: "is"}
_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True)
class Check:
    """One call and what its value must be."""

    call: str
    relation: str
    """'eq', 'ne', 'is', 'truthy' or 'falsy'."""
    expected: Any = None
    imports: str = ""
    """Import statements of the test, run before the call."""


def split(test: str) -> list[Check] | None:
    """The checks a test consists of, or None where it is more than bare calls and literals."""
    if len(test) > LONGEST:
        return None
    return _split_again(test) if len(test) <= CACHED_LENGTH else _split(test)


def _split(test: str) -> list[Check] | None:
    try:
        tree = parse(test)
        body = [] if isinstance(tree, str) else [node for node in tree.body if not isinstance(node, ast.Pass)]
        imports = _leading_imports(body)
        bound = {(name.asname or name.name).split(".")[0] for node in imports for name in node.names}
        lines = test.encode().split(b"\n") if "\r" not in test and "\f" not in test else None
        checks = [_check(statement, lines, bound | _BUILTINS) for statement in body[len(imports) :]]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not checks or any(check is None for check in checks):
        return None
    text = "\n".join(ast.unparse(node) for node in imports)
    return [replace(check, imports=text) for check in checks if check is not None]


# All samples of a prompt come with the same tests.
_split_again = functools.lru_cache(maxsize=8192)(_split)


def _leading_imports(body: list[ast.stmt]) -> list[ast.Import | ast.ImportFrom]:
    found: list[ast.Import | ast.ImportFrom] = []
    for statement in body:
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            break
        found.append(statement)
    return found


def _check(statement: ast.stmt, lines: list[bytes] | None, known: set[str]) -> Check | None:
    if not isinstance(statement, ast.Assert):
        return None
    test = statement.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return Check(_source(test.operand, lines), "falsy") if _is_bare(test.operand, known) else None
    if not isinstance(test, ast.Compare):
        return Check(_source(test, lines), "truthy") if _is_bare(test, known) else None
    relation = _RELATIONS.get(type(test.ops[0]))
    if relation is None or len(test.ops) != 1:
        return None
    for call, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
        found, expected = _literal(other)
        identity = relation == "is" and not (expected is None or isinstance(expected, bool))
        if found and not identity and _is_bare(call, known):
            return Check(_source(call, lines), relation, expected)
    return None


def _is_bare(node: ast.expr, known: set[str]) -> bool:
    """Whether an expression is a call of the program with arguments in which nothing is the program's."""
    if not isinstance(node, ast.Call) or not _asks_nothing([*node.args, *node.keywords], known):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id not in known
    made = node.func.value if isinstance(node.func, ast.Attribute) else None
    named = isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id[:1].isupper()
    return named and isinstance(made, ast.Call) and _is_bare(made, known)


def _asks_nothing(nodes: list[Any], known: set[str]) -> bool:
    parts = [part for node in nodes for part in ast.walk(node)]
    bound = {part.id for part in parts if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
    bound |= {part.arg for part in parts if isinstance(part, ast.arg)}
    return all(part.id in known or part.id in bound for part in parts if isinstance(part, ast.Name))


def _literal(node: ast.expr) -> tuple[bool, Any]:
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None


def _source(node: ast.expr, lines: list[bytes] | None) -> str:
    """The expression's own text, in one piece whatever its lines."""
    if lines is None or node.end_lineno != node.lineno:
        return ast.unparse(node)
    return lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
