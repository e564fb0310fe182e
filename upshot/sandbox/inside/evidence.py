"""Finds in the text of a test which calls are evidence. Nothing is run here.

A call of the program is evidence only if its arguments hold nothing that the program made itself: `close(f(3), 28.27)`
is the program's own claim. The text shows which names can hold something that the program returned; in doubt, they can.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from typing import Any

from upshot.sandbox.inside.cases import is_check_name, last_name, parse, walk

MAIN = "__main__"
REACHING = {
    "seed", "set_state", "setstate", "mock", "patch", "redirect_stdout", "redirect_stderr", "assertNoLogs", "__cause__",
    "__context__", "__notes__", "__traceback__", "__suppress_context__", "eval", "exec", "pickle",
}  # fmt: skip
"""Names that act on the calling process, and parts of an exception that are lost on the way to the judge. A test that
uses one could pass before the judge only because the thing that it inspects is not there, or because the judge itself
ran what the program gave (`eval(f(3))`)."""
HANDS_ON = {"map": 0, "filter": 0, "starmap": 0, "assertRaises": 1, "assertRaisesRegex": 2, "raises": 1}
"""Functions that call one of their arguments with the others; the number is the place of that argument."""
_OWN = frozenset(dir(builtins))
_BINDING = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For | ast.comprehension
_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def list_names(tree: ast.AST) -> set[str]:
    """The names that a text uses."""
    return {node.id for node in walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def hold_given(given: str) -> ast.Module:
    """The part of the row's own code that the judge holds: imports, functions, constants.

    Classes stay in the program: a program works with objects of its own class, and their attributes are data.
    """
    tree = parse(given)
    held = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.Assign | ast.AnnAssign
    body: list[ast.stmt] = [] if isinstance(tree, str) else [node for node in tree.body if isinstance(node, held)]
    return ast.Module(body, [])


def list_words(tree: ast.AST) -> set[str]:
    """The names and attributes that a text uses, and the parts of the names that it imports."""
    imported = {word for path in _list_imports(walk(tree)).values() for word in path.split(".")}
    return imported | {last_name(node) for node in walk(tree) if isinstance(node, ast.Name | ast.Attribute)}


def mark_closed_calls(tree: ast.Module, marker: str, held: set[str]) -> ast.Module:
    """The test, with the marker around every call in whose arguments nothing can belong to the program.

    `held`: names that the judge itself holds, so that they do not belong to the program.
    """
    return ast.fix_missing_locations(_ClosedCalls(marker, _Taint(tree, held)).visit(tree))


class _ClosedCalls(ast.NodeTransformer):
    """Puts the marker around calls in whose arguments nothing can belong to the program."""

    def __init__(self, marker: str, taint: _Taint) -> None:
        self.marker, self.taint = marker, taint

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """The call, marked if it is such a call; or with its function argument marked: `map(f, xs)`.

        A `zip` of the program's data with other data is made strict: of what is shorter, the rest would go unchecked.
        """
        values = [*node.args, *(word.value for word in node.keywords)]
        if last_name(node.func) == "zip" and not node.keywords and len({*map(self.taint.holds, values)}) == 2:
            node.keywords = [ast.keyword("strict", ast.Constant(True))]
        name, place = last_name(node.func), HANDS_ON.get(last_name(node.func), len(node.args))
        closed = not any(map(self.taint.holds, values))
        hands_on = not any(self.taint.holds(value) for value in values if value not in node.args[place : place + 1])
        checks = is_check_name(name) and (isinstance(node.func, ast.Attribute) or name in self.taint.made)
        self.generic_visit(node)
        if hands_on and place < len(node.args):
            node.args[place] = self._mark(node.args[place])
        elif closed and not checks:
            node.func = self._mark(node.func)
        return node

    def _mark(self, function: ast.expr) -> ast.Call:
        return ast.Call(ast.Name(self.marker, ast.Load()), [function], [])


class _Taint:
    """Finds which names of a test can hold something that the program gave, by its text; in doubt, they can."""

    def __init__(self, tree: ast.Module, held: set[str]) -> None:
        self.nodes = nodes = list(walk(tree))
        self.made = made = {node.name for node in nodes if isinstance(node, _DEFINITION)}
        self.stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        self.pure = (_OWN | held | _list_imports(nodes).keys()) - made - self.stored
        """Functions and modules whose results come only from their arguments."""
        self.known = self.pure | self.stored | made
        self.names = {node.arg for node in nodes if isinstance(node, ast.arg)} - {"self", "cls"}
        self.names |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
        flows = list(self._list_flows())
        makers = [places for places, value in flows if any(map(_makes, walk(value)))]
        self.objects = set().union(*makers)
        """Names of objects that the test makes: the results of their methods belong to the program."""
        while more := {place for places, value in flows if self.holds(value) for place in places} - self.names:
            self.names |= more

    def holds(self, value: ast.AST) -> bool:
        """Whether an expression can hold something that the program gave."""
        for node in walk(value):
            if isinstance(node, ast.Call) and not _makes(node) and not self._is_of_data(node.func):
                return True
            place = _place(node)
            if place and place in self.names:
                return True
            if isinstance(node, ast.Name) and place and place not in self.known and not place[:1].isupper():
                return True  # the name belongs to the program
        return False

    def _is_of_data(self, function: ast.expr) -> bool:
        """Whether the call is of a function of Python or a library, or of a method of data: `'a b'.split()`."""
        root = _root(function)
        if root in self.pure or not isinstance(function, ast.Attribute):
            return root in self.pure
        return not self.holds(function.value) and (not root or root in self.stored - self.names - self.objects)

    def _list_flows(self) -> Iterator[tuple[set[str], ast.AST]]:
        """(places, value) of every flow of values: a binding, a store into a part, or a method call with arguments."""
        for node in self.nodes:
            if isinstance(node, _BINDING):
                targets: Any = getattr(node, "targets", None) or [getattr(node, "target", None)]
                value: Any = getattr(node, "value", None) or getattr(node, "iter", None)
                places = _places(*targets)
                if value is not None:
                    yield places | {f"self.{place}" for place in places}, value  # of a class, it may be
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                yield _places(node.optional_vars), node.context_expr
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                for part in (*node.args, *(word.value for word in node.keywords)):
                    yield _places(node.func.value) - self.pure, part


def _makes(node: ast.AST) -> bool:
    """Whether a call makes an object of a class, which is not an answer: `Item('a')`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper()


def _places(*nodes: ast.AST) -> set[str]:
    return {place for node in nodes for part in ast.walk(node) if (place := _place(part))}


def _place(node: ast.AST) -> str:
    """A name, or `self.name`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
        return f"self.{node.attr}"
    return node.id if isinstance(node, ast.Name) and node.id not in ("self", "cls") else ""


def _list_imports(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """The modules (and members of modules) that a text imports, by the name they are bound to."""
    imported: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return imported


def _root(node: ast.expr) -> str:
    """The name from which a chain of calls, attributes and items starts."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
