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
from dataclasses import dataclass, replace
from typing import Any

CACHED_LENGTH = 4096
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
    return _split_again(test) if len(test) <= CACHED_LENGTH else _split(test)


def _split(test: str) -> list[Check] | None:
    try:
        body = ast.parse(test).body
        imports = _leading_imports(body)
        bound = {(name.asname or name.name).split(".")[0] for node in imports for name in node.names}
        checks = [_check(statement, test, OURS | bound) for statement in body[len(imports) :]]
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


def _source(node: ast.expr, test: str) -> str:
    """The expression's own text, in one piece whatever its lines."""
    text = ast.get_source_segment(test, node) or ast.unparse(node)
    return f"({text})" if "\n" in text else text


def _check(statement: ast.stmt, source: str, ours: frozenset[str]) -> Check | None:
    if not isinstance(statement, ast.Assert):
        return None
    test = statement.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _check_truth(test.operand, "falsy", source, ours)
    if not isinstance(test, ast.Compare):
        return _check_truth(test, "truthy", source, ours)
    if len(test.ops) != 1:
        return None
    return _check_comparison((test.left, test.comparators[0]), test.ops[0], source, ours)


def _check_truth(node: ast.expr, relation: str, source: str, ours: frozenset[str]) -> Check | None:
    if not isinstance(node, ast.Call) or _root(node) in ours or not _harmless(node):
        return None
    return Check(_source(node, source), relation)


def _check_comparison(
    sides: tuple[ast.expr, ast.expr], operation: ast.cmpop, source: str, ours: frozenset[str]
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
    if not found or not _is_call(call) or not _harmless(call):
        return None
    if relation == "is" and not (expected is None or isinstance(expected, bool)):
        return None
    if _root(call) in ours and (isinstance(expected, bool) or relation != "eq"):
        return None
    return Check(_source(call, source), relation, expected)


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


def _harmless(node: ast.expr) -> bool:
    """Whether the child may see this expression: nothing in it compares a call with anything."""
    for part in ast.walk(node):
        if isinstance(part, (ast.Compare, ast.BoolOp, ast.BinOp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            holds_call = any(isinstance(inner, ast.Call) for inner in ast.walk(part))
            if holds_call and not _inside_lambda(node, part):
                return False
    return True


def _inside_lambda(tree: ast.expr, part: ast.AST) -> bool:
    lambdas = (node for node in ast.walk(tree) if isinstance(node, ast.Lambda))
    return any(inner is part for node in lambdas for inner in ast.walk(node))
