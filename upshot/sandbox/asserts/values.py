"""Checks that data alone decides: asserts of a bare call and a literal.

`assert CALL == LITERAL` is split if CALL is `f(…)` or `Solution(…).f(…)` and no name in the arguments belongs to the
program. Then the program sees only its arguments, and its answer is data. No other form is split, above all nothing
that computes with the result of a call (`sorted(f(1))`, `f(1)[0]`, `f(1) - 3`): inside the program's process, the
program controls the computation.

The answer is compared as JSON, and no object is built from it, because the program chooses what collides, how deeply it
is nested and how long it is. The program's process has already sorted sets and dictionaries (`plain.sort`). If the two
differ and one has a tag, they may still mean the same (`{1.0}` and `{1}`), so the other looks decide.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import itertools
import json
from dataclasses import dataclass, replace
from typing import Any

from upshot.sandbox.inside import plain
from upshot.sandbox.inside.cases import LONGEST, parse

_RELATIONS: dict[type[ast.cmpop], str] = {ast.Eq: "eq", ast.NotEq: "ne", ast.Is: "is"}
_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True)
class Check:
    """One call, and the condition on its value."""

    call: str
    relation: str
    """'eq', 'ne', 'is', 'truthy' or 'falsy'."""
    expected: Any = None
    """As JSON (`plain.encode`)."""
    imports: str = ""
    """Import statements of the test, run before the call."""


@functools.lru_cache(maxsize=2048)  # all samples of a prompt come with the same tests
def split(test: str) -> list[Check] | None:
    """The checks of which a test consists, or None if it has more than bare calls and literals."""
    if len(test) > LONGEST:
        return None
    try:
        tree = parse(test)
        body = [] if isinstance(tree, str) else [node for node in tree.body if not isinstance(node, ast.Pass)]
        leading = itertools.takewhile(lambda node: isinstance(node, ast.Import | ast.ImportFrom), body)
        imports = [node for node in leading if isinstance(node, ast.Import | ast.ImportFrom)]
        bound = {(name.asname or name.name).split(".")[0] for node in imports for name in node.names}
        checks = [_check(statement, bound | _BUILTINS) for statement in body[len(imports) :]]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not checks or any(check is None for check in checks):
        return None
    text = "\n".join(ast.unparse(node) for node in imports)
    return [replace(check, imports=text) for check in checks if check is not None]


def _check(statement: ast.stmt, known: set[str]) -> Check | None:
    if not isinstance(statement, ast.Assert):
        return None
    test = statement.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return Check(ast.unparse(test.operand), "falsy") if _is_bare(test.operand, known) else None
    if not isinstance(test, ast.Compare):
        return Check(ast.unparse(test), "truthy") if _is_bare(test, known) else None
    relation = _RELATIONS.get(type(test.ops[0]))
    if relation is None or len(test.ops) != 1:
        return None
    for call, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            expected = ast.literal_eval(other)
            comparable = relation != "is" or expected is None or isinstance(expected, bool)
            if comparable and _is_bare(call, known):
                return Check(ast.unparse(call), relation, plain.sort(plain.encode(expected)))
    return None


def _is_bare(node: ast.expr, known: set[str]) -> bool:
    """Whether an expression is a call of the program in whose arguments nothing belongs to the program."""
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


def holds(check: Check, data: Any) -> bool | None:
    """Whether the returned data satisfies the check; None if data alone cannot decide."""
    if check.relation == "is":
        return data is check.expected
    if check.relation in ("truthy", "falsy"):
        return None if isinstance(data, dict) else bool(data) is (check.relation == "truthy")
    same = bool(data == check.expected)
    has_tags = not same and "{" in json.dumps([data, check.expected])
    return None if has_tags else same is (check.relation == "eq")
