"""The text of a test: whether it can tell right from wrong at all, and running everything in it that checks.

A statement checks if it is an assert, a call such as `assertEqual` or `raises`, an `except` that names what it expects,
or an `if` that raises. `test_*` functions nobody calls and unittest cases are run like the rest. A module that is not
installed (`from solution import f`) is the program. Standard library only, and nothing of this package: it runs in the
zygote's children.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

COUNTER = "_upshot_checked"
TEST = "test.py"
PROGRAM = "_upshot_program"
"""The program as a module, in the namespace of its tests."""

LONG = 1000
"""Items of a literal that is data and nothing else: looking through it would take longer than running it."""


class CaseError(Exception):
    """A unittest case that raised something else than a failed assertion."""


class CheckCounter:
    """Counts the checks that are executed; one that `foreign` says is the program's own does not count.

    `begin` is called before every method of a case.
    """

    def __init__(
        self, foreign: Callable[[Any], bool] = lambda function: False, begin: Callable[[], None] = lambda: None
    ) -> None:
        self.count = 0
        self.foreign, self.begin = foreign, begin

    def __call__(self, function: Any = None) -> Any:
        self.count += not self.foreign(function)
        return function


def parse(test: str) -> ast.Module | str:
    """The test's tree, or what is wrong with its text."""
    try:
        return _ProgramImports().visit(ast.parse(test)) if "import" in test else ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"it cannot be read as Python ({type(error).__name__}: {error})"


@functools.lru_cache(maxsize=1024)
def is_installed(module: str) -> bool:
    """Whether there is such a module beside the program."""
    try:
        return module in sys.builtin_module_names or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return module in sys.modules


class _ProgramImports(ast.NodeTransformer):
    """Makes imports from a module that is not installed plain names of the program's."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Names of the program's, under the names they are imported as."""
        if not node.level and is_installed(str(node.module).partition(".")[0]):
            return node
        named = [alias for alias in node.names if alias.asname and alias.asname != alias.name]
        return [_rename(alias.name, alias.asname) for alias in named] or ast.Pass()

    def visit_Import(self, node: ast.Import) -> Any:
        """The program itself."""
        other = [alias for alias in node.names if not is_installed(alias.name.partition(".")[0])]
        node.names = [alias for alias in node.names if alias not in other]
        return [*([node] if node.names else []), *(_rename(PROGRAM, alias.asname or alias.name) for alias in other)]


def _rename(name: str, other: str | None) -> ast.stmt:
    return ast.Assign([ast.Name(str(other), ast.Store())], ast.Name(name, ast.Load()))


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, but for what is in long literals."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not _is_long(node):
            waiting += ast.iter_child_nodes(node)


def _is_long(node: ast.AST) -> bool:
    return len(getattr(node, "elts", None) or getattr(node, "keys", None) or ()) > LONG


def find_faults(trees: Sequence[ast.Module | str]) -> dict[int, str]:
    """By index, the tests that can tell nothing of any program, and why."""
    checkers = {name for tree in trees if not isinstance(tree, str) for name in _list_checkers(tree)}
    found = ((index, _find_fault(tree, checkers)) for index, tree in enumerate(trees))
    return {index: why for index, why in found if why}


def _list_checkers(tree: ast.Module) -> list[str]:
    defined = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return [node.name for node in defined if any(_is_check(part) for part in walk(node))]


def _find_fault(tree: ast.Module | str, checkers: set[str]) -> str:
    if isinstance(tree, str):
        return tree
    nodes = list(walk(tree))
    names = {node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in nodes}
    for function in _list_uncalled(tree):
        given = function.args
        if len(given.posonlyargs) + len(given.args) > len(given.defaults) or None in given.kw_defaults:
            return f"{function.name} takes arguments that nobody gives"
    if not any(_is_check(node) for node in nodes) and not names & checkers:
        return "it checks nothing"
    return ""


def _is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Call):
        return _is_checking_call(node)
    if isinstance(node, ast.ExceptHandler):
        return isinstance(node.type, ast.expr) and last_name(node.type) not in ("Exception", "BaseException")
    return isinstance(node, ast.If) and any(isinstance(part, ast.Raise) for part in node.body + node.orelse)


def _is_checking_call(node: ast.Call) -> bool:
    return last_name(node.func).startswith(("assert", "fail")) or last_name(node.func) == "raises"


def last_name(node: ast.expr) -> str:
    """The last word of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


class _Counting(ast.NodeTransformer):
    """Puts the counter in front of every check."""

    def generic_visit(self, node: ast.AST) -> Any:
        if _is_long(node):
            return node
        super().generic_visit(node)
        if isinstance(node, ast.Call) and _is_checking_call(node):
            node.func = ast.Call(ast.Name(COUNTER, ast.Load()), [node.func], [])
        elif isinstance(node, ast.ExceptHandler) and _is_check(node):
            node.body.insert(0, _make_count())
        elif isinstance(node, ast.Assert | ast.If) and _is_check(node):
            return [_make_count(), node]
        return node


def _make_count() -> ast.Expr:
    return ast.Expr(ast.Call(ast.Name(COUNTER, ast.Load()), [], []))


def run(tree: ast.Module, namespace: dict[str, Any], checked: CheckCounter) -> None:
    """Run a test and all cases in it; raises what fails."""
    functions, classes = _list_uncalled(tree), [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    namespace[COUNTER] = checked
    code = compile(ast.fix_missing_locations(_Counting().visit(tree)), TEST, "exec", dont_inherit=True)
    try:
        exec(code, namespace)
    except SystemExit as error:  # how a script of tests ends; not when the program ends it
        if error.code or "remote_tail" in error.__dict__ or _is_from_elsewhere(error):
            raise
    for function in functions:
        _call(namespace[function.name])
    for name in classes:
        kind = namespace.get(name)
        if isinstance(kind, type) and "unittest" in sys.modules and issubclass(kind, sys.modules["unittest"].TestCase):
            _run_case(kind, checked.begin)
        elif isinstance(kind, type) and name.startswith("Test"):
            _run_methods(kind, checked.begin)


def _is_from_elsewhere(error: BaseException) -> bool:
    """Whether an exception was raised by what the test's own text called; `exit()` is Python's."""
    step, files = error.__traceback__, []
    while step is not None:
        files.append(step.tb_frame.f_code.co_filename)
        step = step.tb_next
    own = files[files.index(TEST) :] if TEST in files else files
    return any(file != TEST and "_sitebuiltins" not in file for file in own)


def standalone(test: str) -> str:
    """The test's text with calls of the cases in it, for runners that only execute text behind a program."""
    tree = parse(test)
    if isinstance(tree, str):
        return test
    calls = [f"{function.name}()" for function in _list_uncalled(tree)]
    for node in tree.body:
        if _is_case(node):
            calls += ["_result = __import__('unittest').TestResult()"]
            calls += [f"__import__('unittest').defaultTestLoader.loadTestsFromTestCase({node.name}).run(_result)"]
            calls += ["assert _result.wasSuccessful(), str(_result.errors + _result.failures)[:500]"]
    text = ast.unparse(ast.fix_missing_locations(tree)) if "import" in test else test
    named = [f"{PROGRAM} = __import__('sys').modules[__name__]"] if PROGRAM in text else []
    return "\n".join([*named, text, *calls])


def each_method(source: str) -> list[str]:
    """The source of unittest classes, once for every test method, without the others; itself if it has none."""
    tree = parse(source)
    if isinstance(tree, str):
        return [source]
    found = [(node.name, item.name) for node in tree.body if _is_case(node) for item in node.body if _is_test(item)]
    return [ast.unparse(_Only(names).visit(ast.parse(source))) for names in found] or [source]


class _Only(ast.NodeTransformer):
    """Leaves one test method of one class."""

    def __init__(self, names: tuple[str, str]) -> None:
        self.names = names

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Drop all test methods but the one."""
        kept = [item for item in node.body if not _is_test(item) or (node.name, item.name) == self.names]
        node.body = kept or [ast.Pass()]
        return node


def _is_case(node: ast.stmt) -> TypeGuard[ast.ClassDef]:
    """Whether it is a unittest class."""
    return isinstance(node, ast.ClassDef) and any("TestCase" in last_name(base) for base in node.bases)


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def _list_uncalled(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    used = {node.id for node in walk(tree) if isinstance(node, ast.Name)}
    return [node for node in tree.body if _is_test(node) and node.name not in used]


def _call(function: Any) -> None:
    found = function()
    if type(found).__name__ == "coroutine":
        import asyncio

        asyncio.run(found)


def _run_methods(kind: type, begin: Callable[[], None]) -> None:
    for name in [name for name in vars(kind) if name.startswith("test")]:
        begin()
        one = kind()
        getattr(one, "setup_method", lambda: None)()
        _call(getattr(one, name))


def _run_case(kind: Any, begin: Callable[[], None]) -> None:
    import unittest  # the test has it; every fork would pay for it otherwise

    class Result(unittest.TestResult):
        """Says when a method begins."""

        def startTest(self, test: Any) -> None:
            """Before `setUp`."""
            begin()
            super().startTest(test)

    result = Result()
    unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
    if result.errors:
        raise CaseError(result.errors[0][1])
    if not result.wasSuccessful():
        raise AssertionError(result.failures[0][1] if result.failures else "an expected failure succeeded")
