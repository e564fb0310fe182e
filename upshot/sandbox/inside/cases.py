"""Reads the text of a test: does it check anything at all? And runs every check in it.

A check is an assert, a call such as `assertEqual` or `raises`, an `except` that names the expected exception, or an
`if` that raises. `test_*` functions that nobody calls, and unittest cases, are run as well. A module that is not
installed (`from solution import f`) is the program. Standard library only: it runs in the zygote's children.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

NOTHING_CHECKED = "none of its checks was executed"
"""A reason why a pass is not confirmed. For a reference, it means that the test is broken. For any other program it is
a doubt like all others: it may lack a name that the test needs before it checks (`if "f" in globals(): …`)."""
COUNTER = "_upshot_checked"
TEST = "test.py"
PROGRAM = "_upshot_program"
"""The program as a module, in the namespace of its tests."""

OWN_FIXTURES = frozenset(("tmp_path", "capsys", "monkeypatch", "request", "recwarn", "caplog", "subtests"))
"""Arguments that pytest itself gives."""
PYTEST_FILE = "test_program.py"
PYTEST_ARGUMENTS = (
    "-s", "--noconftest", "-c", os.devnull, "--rootdir", ".", "--confcutdir", ".", "--import-mode=importlib",
)  # fmt: skip
"""Keeps pytest from reading the parent folders, which a run without namespaces may not read."""
PYTEST_WITHOUT = ("cacheprovider", "terminal", "faulthandler", "logging", "junitxml", "pastebin", "doctest")
"""Plug-ins that are switched off: their files and reports are not needed here."""
LONGEST = 32_768
"""Tests up to this many characters are read outside a run; a longer one is read in a run, within the run's time."""
LONG = 1000
"""Literals with more items that are only data are not searched: that would take longer than running the test."""


class CaseError(Exception):
    """A unittest case that raised something other than a failed assertion."""


class CheckCounter:
    """Counts the executed checks; a check that `foreign` attributes to the program does not count."""

    def __init__(self, foreign: Callable[[Any], bool] = lambda function: False) -> None:
        self.count = 0
        self.foreign = foreign

    def __call__(self, function: Any = None) -> Any:
        self.count += not self.foreign(function)
        return function


def parse(test: str) -> ast.Module | str:
    """The test's syntax tree, or the problem of its text."""
    try:
        return _ProgramImports().visit(ast.parse(test)) if "import" in test else ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"it cannot be read as Python ({type(error).__name__}: {error})"


@functools.lru_cache(maxsize=1024)
def is_installed(module: str) -> bool:
    """Whether such a module exists besides the program."""
    with contextlib.suppress(ImportError, ValueError):
        return module in sys.builtin_module_names or importlib.util.find_spec(module) is not None
    return module in sys.modules


class _ProgramImports(ast.NodeTransformer):
    """Turns imports from a module that is not installed into plain names of the program."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Names of the program, bound to the names under which they are imported."""
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
    """All nodes except those in long literals."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not _is_long(node):
            waiting += ast.iter_child_nodes(node)


def _is_long(node: ast.AST) -> bool:
    return len(getattr(node, "elts", None) or getattr(node, "keys", None) or ()) > LONG


@functools.lru_cache(maxsize=1024)  # all samples of a prompt come with the same tests
def find_faults(tests: tuple[str, ...]) -> dict[int, str]:
    """The tests that say nothing about any program, by index, and why; long tests are not examined."""
    unread = ast.Module([ast.Assert(ast.Constant(True))], [])
    trees = [parse(test) if len(test) <= LONGEST else unread for test in tests]
    top = [node for tree in trees if isinstance(tree, ast.Module) for node in tree.body]
    defined = [node for node in top if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    checkers = {node.name for node in defined if any(map(_is_check, walk(node)))}
    faults = {index: _find_fault(tree, checkers) for index, tree in enumerate(trees)}
    return {index: why for index, why in faults.items() if why}


def _find_fault(tree: ast.Module | str, checkers: set[str]) -> str:
    if isinstance(tree, str):
        return tree
    nodes = list(walk(tree))
    names = {node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in nodes}
    fixtures = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.decorator_list}
    for function in _list_uncalled(tree):
        wanted = {part.arg for part in function.args.args} - fixtures
        if _takes_arguments(function) and not function.decorator_list and wanted - OWN_FIXTURES:
            return f"{function.name} takes arguments that nothing provides"
    if not any(_is_check(node) for node in nodes) and not names & checkers:
        return "it checks nothing"
    return ""


def _is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Call):
        return is_check_name(last_name(node.func))
    if isinstance(node, ast.ExceptHandler):
        return isinstance(node.type, ast.expr) and last_name(node.type) not in ("Exception", "BaseException")
    return isinstance(node, ast.If) and any(isinstance(part, ast.Raise) for part in node.body + node.orelse)


def is_check_name(name: str) -> bool:
    """Whether a call of this name is a check."""
    return name.startswith(("assert", "fail")) or name == "raises"


def last_name(node: ast.expr) -> str:
    """The last word of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


class _Counting(ast.NodeTransformer):
    """Puts the counter in front of every check."""

    def generic_visit(self, node: ast.AST) -> Any:
        if _is_long(node):
            return node
        super().generic_visit(node)
        if isinstance(node, ast.Call) and _is_check(node):
            node.func = ast.Call(ast.Name(COUNTER, ast.Load()), [node.func], [])
        elif isinstance(node, ast.ExceptHandler) and _is_check(node):
            node.body.insert(0, _make_count())
        elif isinstance(node, ast.Assert | ast.If) and _is_check(node):
            return [_make_count(), node]
        return node


def _make_count() -> ast.Expr:
    return ast.Expr(ast.Call(ast.Name(COUNTER, ast.Load()), [], []))


def prepare(tests: Sequence[str]) -> None:
    """Make `unittest.main()` in a test do nothing, because its cases are run here."""
    if any("unittest" in test for test in tests):
        importlib.import_module("unittest").__dict__["main"] = lambda *_, **__: None


def run(tree: ast.Module, namespace: dict[str, Any], checked: CheckCounter) -> None:
    """Run a test and all cases in it; raises the first failure."""
    functions, classes = _list_uncalled(tree), [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    with_pytest = needs_pytest(tree)
    namespace[COUNTER] = checked
    code = compile(ast.fix_missing_locations(_Counting().visit(tree)), TEST, "exec", dont_inherit=True)
    try:
        exec(code, namespace)
    except SystemExit as error:  # how a script of tests ends; not when the program ends it
        if error.code or _is_from_elsewhere(error):
            raise
    if with_pytest:
        _run_pytest({name: namespace[name] for name in _list_bound(tree) if name in namespace})
        return
    for function in functions:
        result = namespace[function.name]()
        if type(result).__name__ == "coroutine":
            importlib.import_module("asyncio").run(result)
    for name in classes:
        kind = namespace.get(name)
        if isinstance(kind, type) and "unittest" in sys.modules and issubclass(kind, sys.modules["unittest"].TestCase):
            _run_case(kind)


def needs_pytest(tree: ast.Module) -> bool:
    """Whether only pytest can run a test: classes `Test…` that are not a TestCase, fixtures, parameters."""
    tested = [node for node in _list_uncalled(tree) if _takes_arguments(node) or node.decorator_list]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not is_case(node)]
    bare = [node for node in classes if node.name.startswith("Test") and any(map(is_test, node.body))]
    named = {word for node in walk(tree) if isinstance(node, ast.Attribute | ast.Name) for word in [last_name(node)]}
    return bool(bare or tested or (named & {"fixture", "pytestmark"})) and is_installed("pytest")


def _list_bound(tree: ast.Module) -> set[str]:
    """The names that a test itself binds at its top level."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    defined = {node.name for node in tree.body if isinstance(node, kinds)}
    return defined | {node.id for node in walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _takes_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function cannot be called without arguments."""
    taken = node.args
    return len(taken.posonlyargs) + len(taken.args) > len(taken.defaults) or None in taken.kw_defaults


def _is_from_elsewhere(error: BaseException) -> bool:
    """Whether an exception was raised by a call in the test's own text; `exit()` is Python's."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    below = files[files.index(TEST) :] if TEST in files else files
    return any(file != TEST and "_sitebuiltins" not in file for file in below)


def standalone(test: str) -> str:
    """The test's text with calls of its cases, for runners that only execute text appended to a program."""
    tree = parse(test)
    if isinstance(tree, str):
        return test
    calls = [f"{function.name}()" for function in _list_uncalled(tree)]
    for node in tree.body:
        if is_case(node):
            calls += ["_result = __import__('unittest').TestResult()"]
            calls += [f"__import__('unittest').defaultTestLoader.loadTestsFromTestCase({node.name}).run(_result)"]
            calls += ["assert _result.wasSuccessful(), str(_result.errors + _result.failures)[:500]"]
    text = ast.unparse(ast.fix_missing_locations(tree)) if "import" in test else test
    named = [f"{PROGRAM} = __import__('sys').modules[__name__]"] if PROGRAM in text else []
    return "\n".join([*named, text, *calls])


def is_case(node: ast.stmt) -> TypeGuard[ast.ClassDef]:
    """Whether it is a unittest class."""
    return isinstance(node, ast.ClassDef) and any("TestCase" in last_name(base) for base in node.bases)


def is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Whether it is a function or method that a runner of tests would call."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def _list_uncalled(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    used = {node.id for node in walk(tree) if isinstance(node, ast.Name)}
    return [node for node in tree.body if is_test(node) and node.name not in used]


def _run_case(kind: Any) -> None:
    import unittest  # at the top of the file, every fork would pay for it

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
    if result.errors:
        raise CaseError(result.errors[0][1])
    if not result.wasSuccessful() or result.skipped:
        skipped = [f"skipped: {why}" for _, why in result.skipped]
        raise AssertionError([*(text for _, text in result.failures), *skipped, "an expected failure succeeded"][0])


class _Reports:
    """Gives pytest a module that is already loaded, and records the outcome of each of its tests."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module
        self.passed = 0
        self.failures: list[str] = []

    def pytest_pycollect_makemodule(self, module_path: Any, parent: Any) -> Any:
        import pytest

        made = pytest.Module.from_parent(parent, path=module_path)
        made.obj = self.module
        return made

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:
            self.failures.append(str(report.longrepr))
        self.passed += report.passed and getattr(report, "when", "") == "call"

    pytest_collectreport = pytest_runtest_logreport


def _run_pytest(names: dict[str, Any]) -> None:
    """Run the tests among the names of a module; raises AssertionError if one fails or is skipped."""
    import pytest  # takes a third of a second

    module = types.ModuleType(PYTEST_FILE.removesuffix(".py"))
    module.__dict__.update(names)
    with open(PYTEST_FILE, "w"):
        reports = _Reports(module)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    left_out = [word for name in PYTEST_WITHOUT for word in ("-p", f"no:{name}")]
    pytest.main([*PYTEST_ARGUMENTS, *left_out, PYTEST_FILE], plugins=[reports])
    if reports.failures or not reports.passed:
        raise AssertionError([*reports.failures, "pytest ran none of its tests"][0][-500:])
