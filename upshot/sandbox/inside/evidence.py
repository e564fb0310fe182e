"""What the text of a test says about whether data alone can decide it.

A test is decided by what a judge sees of the program from outside (`judge.py`). Some things no copy of data can show,
and a test that is about one of them is known by its text, whatever the program: it uses files, clocks, seeds or
patches, asks which of two objects is which, or has the program's functions judge what the program's functions returned.
Everything here is syntax: nothing is run, so a data set can be looked through before anybody trains on it.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from upshot.sandbox.inside.cases import PROGRAM, is_installed, last_name, parse, walk
from upshot.sandbox.inside.plain import TYPES
from upshot.sandbox.inside.syscall_table import words

MAIN = "__main__"
PURE = words(
    """
    abc bisect calendar cmath collections contextlib copy dataclasses datetime decimal enum fractions functools heapq
    itertools json math numbers numpy operator pytest random re statistics string textwrap types typing unittest
    """
)
"""Modules whose work is the same in every process: the judge has its own, and a test may use them."""
ALIASES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot", "sns": "seaborn", "tf": "tensorflow"}
REACHING = words("seed set_state mock patch redirect_stdout redirect_stderr now today utcnow")
"""What is in pure modules and is not pure: clocks, seeds, and what reaches into the program's process."""
SIMPLE = words("collections functools itertools math operator re string typing unittest")
"""Modules without state, and without objects that a program's are easily mixed up with."""
STATEFUL = words("random np numpy warnings logging decimal calendar datetime isinstance issubclass getattr hasattr id")
MADE_HERE = words("__cause__ __context__ __notes__ __traceback__ __suppress_context__")
LISTENING = words("assertLogs assertNoLogs assertWarns assertWarnsRegex")
"""What a case hears of its own process alone."""
BUILTINS_THAT_REACH = words("open input exec eval compile globals locals __import__ breakpoint id dir")
_OWN = frozenset(dir(builtins))
_BINDING = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For | ast.comprehension


def list_names(tree: ast.AST) -> set[str]:
    """The names a text uses."""
    return {node.id for node in walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def list_definitions(tree: ast.Module) -> set[str]:
    """The names a text gives a meaning of its own at its top level, but for imports."""
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = (node for part in tree.body if not isinstance(part, ast.FunctionDef | ast.ClassDef) for node in walk(part))
    return defined | {node.id for node in stored if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def hold_given(given: str) -> ast.Module:
    """What the judge holds of the text a row brings along: imports, functions, constants.

    Its classes stay the program's: a program works with objects of its own class, and attributes of those are data.
    """
    tree = parse(given)
    held = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.Assign | ast.AnnAssign
    body: list[ast.stmt] = [] if isinstance(tree, str) else [node for node in tree.body if isinstance(node, held)]
    return ast.Module(body, [])


def find_modules(trees: Iterable[ast.Module]) -> set[str]:
    """Names that texts use as a module is used (`name.attribute`, never called or set) and that are a module's."""
    dotted, others = set(), set()
    for node in (node for tree in trees for node in walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dotted.add(node.value.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            others.add(node.func.id)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            others.add(node.id)
        elif isinstance(node, ast.arg):
            others.add(node.arg)
    return {name for name in dotted - others - {PROGRAM} if name in ALIASES or is_installed(name)}


def is_simple(tree: ast.Module) -> bool:
    """Whether a failure of the test in the judge's hands can be nobody's but the program's, as far as its text tells.

    Nothing that is done otherwise there than plainly: exceptions, contexts, globals, deletion, identity, libraries with
    state or with objects of their own.
    """
    odd = (
        ast.With | ast.AsyncWith | ast.Try | ast.Global | ast.Nonlocal | ast.Delete | ast.Await | ast.Yield | ast.Raise
    )
    for node in walk(tree):
        if isinstance(node, odd) or (isinstance(node, ast.Attribute) and node.attr.startswith("__")):
            return False
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            return False
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            if any(name.partition(".")[0] not in SIMPLE for name in names):
                return False
        if isinstance(node, ast.Name) and node.id in STATEFUL:
            return False
    return True


class _ClosedCalls(ast.NodeTransformer):
    """Puts a marker around what is called with nothing that could be the program's."""

    def __init__(self, marker: str, taint: _Taint) -> None:
        self.marker, self.taint = marker, taint

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """The call, marked where it is one."""
        given = [*node.args, *(word.value for word in node.keywords)]
        closed = not any(map(self.taint.holds, given))
        self.generic_visit(node)
        name = last_name(node.func)
        checks = name.startswith(("assert", "fail")) and (
            isinstance(node.func, ast.Attribute) or name in self.taint.made
        )
        if closed and not checks:
            literal = ast.Constant(all(map(_is_literal, given)))
            node.func = ast.Call(ast.Name(self.marker, ast.Load()), [node.func, literal], [])
        return node


def mark_closed_calls(tree: ast.Module, marker: str, own: set[str]) -> ast.Module:
    """The test with the marker around what it calls with arguments in which nothing can be the program's.

    `own`: names that mean nothing of the program's (what the judge itself holds).
    """
    return ast.fix_missing_locations(_ClosedCalls(marker, _Taint(tree, own)).visit(tree))


class _Taint:
    """Which names of a test can hold something that the program gave, as far as its text tells; in doubt they can."""

    def __init__(self, tree: ast.Module, own: set[str]) -> None:
        nodes = list(walk(tree))
        self.nodes = nodes
        self.made = {
            node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        self.stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        self.pure = (_OWN | own | _list_imports(nodes).keys()) - self.made - self.stored
        """Functions and modules that give nothing but what they are given."""
        self.names = {node.arg for node in nodes if isinstance(node, ast.arg)} - {"self", "cls"}
        self.names |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
        self.objects = {
            place
            for places, value in self._list_flows()
            if any(self._makes(node) for node in walk(value))
            for place in places
        }
        """Names of objects that the test makes: what their methods return is the program's."""
        size = -1
        while size != len(self.names):
            size = len(self.names)
            for places, value in self._list_flows():
                if self.holds(value):
                    self.names |= places

    def holds(self, value: ast.AST) -> bool:
        """Whether an expression can hold something that the program gave."""
        for node in walk(value):
            if isinstance(node, ast.Call) and not self._makes(node) and not self._is_of_data(node.func):
                return True
            place = _place(node)
            if place and place in self.names:
                return True
            own = self.pure | self.stored | self.made
            if isinstance(node, ast.Name) and place and place not in own and not place[:1].isupper():
                return True  # a name of the program's
        return False

    @staticmethod
    def _makes(node: ast.AST) -> bool:
        """Whether a call makes an object of a class, which is no answer: `Item('a')`."""
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper()

    def _is_of_data(self, function: ast.expr) -> bool:
        """Whether a function of Python's or of a library's is called, or a method of data: `'a b'.split()`."""
        root = _root(function)
        if root in self.pure or not isinstance(function, ast.Attribute):
            return root in self.pure
        return not self.holds(function.value) and (not root or root in self.stored - self.names - self.objects)

    def _list_flows(self) -> Iterator[tuple[set[str], ast.AST]]:
        """What is put where: by a binding, into a part of something, or by a method of something."""
        for parts, value in _list_bindings(self.nodes):
            found = {place for part in parts if (place := _place(part))}
            yield found | {f"self.{place}" for place in found}, value  # of a class, it may be
        for node in self.nodes:
            if isinstance(node, ast.withitem) and node.optional_vars is not None:
                yield {place for part in ast.walk(node.optional_vars) if (place := _place(part))}, node.context_expr
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                places = {place for part in ast.walk(node.func.value) if (place := _place(part))}
                for part in (*node.args, *(word.value for word in node.keywords)):
                    yield places - self.pure, part


def _place(node: ast.AST) -> str:
    """A name, or `self.name`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
        return f"self.{node.attr}"
    return node.id if isinstance(node, ast.Name) and node.id not in ("self", "cls") else ""


def _is_literal(node: ast.AST) -> bool:
    if isinstance(node, ast.List | ast.Tuple):
        return all(map(_is_literal, node.elts))
    if isinstance(node, ast.Dict):
        return all(key is not None and _is_literal(key) for key in node.keys) and all(map(_is_literal, node.values))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.operand, ast.Constant)
    return isinstance(node, ast.Constant)


def list_libraries(tree: ast.Module) -> set[str]:
    """The first words of the modules that a text imports or names."""
    return {path.partition(".")[0] for path in _list_imports(walk(tree)).values()} | list_names(tree)


def shares_results(tree: ast.Module) -> bool:
    """Whether methods of the cases in a text can hold something together: by their class, a global, the text itself."""
    for node in walk(tree):
        if isinstance(node, ast.Global) or last_name(getattr(node, "func", ast.Name(""))) == "setattr":
            return True
        if isinstance(node, ast.FunctionDef) and node.name in ("setUpClass", "setUpModule", "setup_class"):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not _place(node).startswith("self."):
            return True
    own = (part for node in tree.body if isinstance(node, ast.ClassDef) for part in node.body)
    return any(isinstance(part, ast.Assign | ast.AnnAssign) for part in (*tree.body, *own))


def find_doubts(tests: Sequence[ast.Module | str], given: str = "") -> dict[int, str]:
    """By index, the tests that no data can decide, whatever the program, and why; tests share what they define."""
    trees = {index: parse(test) if isinstance(test, str) else test for index, test in enumerate(tests)}
    read = {index: tree for index, tree in trees.items() if isinstance(tree, ast.Module)}
    held = hold_given(given)
    libraries = _list_imports([*ast.walk(held), *(node for tree in read.values() for node in walk(tree))])
    libraries |= {name: ALIASES.get(name, name) for name in find_modules(read.values()) - libraries.keys()}
    own = list_definitions(held).union(libraries, *map(list_definitions, read.values()))
    found = {index: _find_doubt(list(walk(tree)), libraries, own) for index, tree in read.items()}
    return {index: why for index, why in found.items() if why}


def _find_doubt(nodes: list[ast.AST], libraries: dict[str, str], own: set[str]) -> str:
    return _find_reach(nodes, libraries, own) or _find_identity(nodes) or _find_feedback(nodes, own | _OWN)


def _list_imports(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """By the name they are bound to, the modules (and members of modules) that a text imports."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _find_reach(nodes: list[ast.AST], libraries: dict[str, str], own: set[str]) -> str:
    for node in nodes:
        if isinstance(node, ast.Name):
            path = libraries.get(node.id, "")
            if path and (path.partition(".")[0] not in PURE or not REACHING.isdisjoint(path.split("."))):
                return f"it uses {path}, which works on the program's process, files or clock"
            if node.id in BUILTINS_THAT_REACH - own:
                return f"it uses {node.id}(), which works on the process it is called in"
        elif isinstance(node, ast.Attribute) and node.attr in MADE_HERE:
            return f"it looks at .{node.attr} of an exception, which is made anew on its way"
        elif isinstance(node, ast.Attribute) and node.attr in LISTENING:
            return f"it uses {node.attr}, which hears nothing of the program's process"
        elif isinstance(node, ast.Attribute) and (library := libraries.get(_root(node))):
            reaches = node.attr in REACHING or not isinstance(node.ctx, ast.Load)
            if reaches:
                return f"it uses .{node.attr} of {library}, which works on the process it is called in"
    return ""


def _find_identity(nodes: list[ast.AST]) -> str:
    """Whether it asks which of two objects is which; None, True or a type such as `int` is the same one everywhere."""
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    kinds = TYPES.keys() - bound - {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and last_name(node.func) in ("assertIs", "assertIsNot"):
            sides = node.args
        known = (isinstance(side, ast.Constant) or (isinstance(side, ast.Name) and side.id in kinds) for side in sides)
        if sides and not any(known):
            return "it asks whether two objects are the same one"
    return ""


def _find_feedback(nodes: list[ast.AST], own: set[str]) -> str:
    """Whether a function of the program's is given what the program returned: `close(f(3), 28.27)` is its own word.

    Objects that the test makes of classes (capital names) are no such thing: what they hold is asked for as data.
    """
    fed: set[str] = set()
    """Variables that hold what the program returned."""
    bindings = [
        ({part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}, value)
        for parts, value in _list_bindings(nodes)
    ]
    while more := {name for names, value in bindings if _tells(value, own, fed) for name in names} - fed:
        fed |= more
    calls = (node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    for call in calls:
        given, name = (*call.args, *(word.value for word in call.keywords)), last_name(call.func)
        if name not in own and not name[:1].isupper() and any(_tells(part, own, fed) for part in given):
            return f"{name}() of the program's judges what the program returned"
    return ""


def _list_bindings(nodes: list[ast.AST]) -> Iterator[tuple[list[ast.AST], ast.expr]]:
    """Of what is bound, every part of the targets, and the value."""
    for node in (node for node in nodes if isinstance(node, _BINDING)):
        targets: Any = getattr(node, "targets", None) or [getattr(node, "target", None)]
        value: Any = getattr(node, "value", None) or getattr(node, "iter", None)
        if value is not None:
            yield [part for target in targets for part in ast.walk(target)], value


def _tells(value: ast.AST, own: set[str], fed: set[str]) -> bool:
    """Whether an expression holds something that a function or method of the program returned."""
    for node in walk(value):
        if isinstance(node, ast.Name) and node.id in fed:
            return True
        if isinstance(node, ast.Call):
            root = _root(node.func)
            makes = isinstance(node.func, ast.Name) and root[:1].isupper()
            if root and root not in own and not makes and (isinstance(node.func, ast.Name) or root[:1].isupper()):
                return True
    return False


def _root(node: ast.expr) -> str:
    """The name a chain of calls, attributes and items starts from."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
