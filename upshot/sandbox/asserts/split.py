"""Splitting asserts: what the program must compute, and what outside it must come to.

`assert CALL == LITERAL` becomes a call for the child and an expectation that stays outside. An assert whose left side
would show the child what is expected (a comparison, arithmetic with the expected number, a helper such as isclose) is
not split; the judge process runs it.
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

CACHED_LENGTH = 4096
LONGEST = 32_768
"""Characters of a test that is read here; the judge reads a longer one, on the run's own time."""
OURS = (
    frozenset(dir(builtins))
    | sys.stdlib_module_names
    | {"np", "numpy", "pd", "isclose", "allclose", "array_equal", "Counter", "deque", "defaultdict"}
)
"""Names the judge provides itself: a truth computed by one of these is not taken from the program."""


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
    """The checks a test consists of, or None where a judge must run it."""
    if len(test) > LONGEST:
        return None
    return _split_again(test) if len(test) <= CACHED_LENGTH else _split(test)


def _split(test: str) -> list[Check] | None:
    try:
        body = ast.parse(test).body
        imports = _leading_imports(body)
        bound = {(name.asname or name.name).split(".")[0] for node in imports for name in node.names}
        ours = OURS | bound
        lines = test.encode().split(b"\n") if "\r" not in test and "\f" not in test else None
        checks = [_check(statement, lines, ours) for statement in body[len(imports) :]]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not checks or any(check is None for check in checks):
        return None
    text = "\n".join(ast.unparse(node) for node in imports)
    return [replace(check, imports=text) for check in checks if check is not None]


def _leading_imports(body: list[ast.stmt]) -> list[ast.Import | ast.ImportFrom]:
    found: list[ast.Import | ast.ImportFrom] = []
    for statement in body:
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            break
        found.append(statement)
    return found


# All samples of a prompt come with the same tests.
_split_again = functools.lru_cache(maxsize=8192)(_split)


def _source(node: ast.expr, lines: list[bytes] | None) -> str:
    """The expression's own text, in one piece whatever its lines."""
    if lines is None or node.end_lineno != node.lineno:
        return ast.unparse(node)
    return lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()


def _check(statement: ast.stmt, lines: list[bytes] | None, ours: frozenset[str]) -> Check | None:
    if not isinstance(statement, ast.Assert):
        return None
    test = statement.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _check_truth(test.operand, "falsy", lines, ours)
    if not isinstance(test, ast.Compare):
        return _check_truth(test, "truthy", lines, ours)
    if len(test.ops) != 1:
        return None
    return _check_comparison((test.left, test.comparators[0]), test.ops[0], lines, ours)


def _check_truth(node: ast.expr, relation: str, lines: list[bytes] | None, ours: frozenset[str]) -> Check | None:
    if not isinstance(node, ast.Call) or _root(node) in ours or _asks_a_value(node) or not _harmless(node):
        return None
    return Check(_source(node, lines), relation)


def _check_comparison(
    sides: tuple[ast.expr, ast.expr], operation: ast.cmpop, lines: list[bytes] | None, ours: frozenset[str]
) -> Check | None:
    left, right = sides
    relations = {ast.Eq: "eq", ast.NotEq: "ne", ast.Is: "is"}
    relation = relations.get(type(operation))
    if relation is None:
        return None
    found, expected = _literal(right)
    call = left
    if not found:
        found, expected = _literal(left)
        call = right
    if not found or not _is_call(call) or _asks_a_value(call) or not _harmless(call):
        return None
    if relation == "is" and not (expected is None or isinstance(expected, bool)):
        return None
    if _root(call) in ours and (isinstance(expected, bool) or relation != "eq"):
        return None
    return Check(_source(call, lines), relation, expected)


def _literal(node: ast.expr) -> tuple[bool, Any]:
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None


def _is_call(node: ast.expr) -> bool:
    """A call, or an item or attribute of one."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return isinstance(node, ast.Call)


def _root(node: ast.expr) -> str:
    """The name a call chain starts from: `f` in f(x), `Solution` in Solution().f(x), `math` in math.isclose(a, b)."""
    while True:
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        else:
            return node.id if isinstance(node, ast.Name) else ""


def _asks_a_value(node: ast.expr) -> bool:
    """Whether a method is called on what a call returned, `f(x).startswith("a")`: only the judge knows it is a value.

    `Solution().f(x)` is not that: the test makes the object itself, from a class it names.
    """
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            made = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id[:1].isupper()
            if not made and any(isinstance(part, ast.Call) for part in _chain(owner)):
                return True
        node = node.func if isinstance(node, ast.Call) else node.value
    return False


def _chain(node: ast.expr) -> Iterator[ast.expr]:
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        yield node
        node = node.func if isinstance(node, ast.Call) else node.value


_COMPUTES = (ast.Compare, ast.BoolOp, ast.BinOp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def _harmless(node: ast.expr) -> bool:
    """Whether the child may see this expression: nothing in it, but for lambdas, computes with what a call gives."""
    suspects = [node]
    while suspects:
        part: ast.AST = suspects.pop()
        if isinstance(part, ast.Lambda):
            continue
        if isinstance(part, _COMPUTES):
            if any(isinstance(inner, ast.Call) for inner in ast.walk(part)):
                return False
            continue
        suspects += ast.iter_child_nodes(part)  # type: ignore[arg-type]
    return True
