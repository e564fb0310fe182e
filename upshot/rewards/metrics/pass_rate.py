"""The share of unit tests that the code passes, in the sandbox."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from upshot.chat import Conversation, Row
from upshot.errors import UserError
from upshot.rewards.metric import Metric, metrics
from upshot.rewards.metrics.extraction import last_fence
from upshot.score import Reason, Score

if TYPE_CHECKING:
    from upshot.sandbox.runner import CodeRunner

_UNIT = """
def _upshot_unit(case, name):
    import io, unittest
    result = unittest.TextTestRunner(stream=io.StringIO()).run(unittest.TestSuite([globals()[case](name)]))
    return result.testsRun == 1 and result.wasSuccessful()
"""


@metrics.register("pass_rate")
class PassRate(Metric):
    """Passed tests / all tests of the program in the last assistant message (`code->pass_rate`: of the whole chat).

    The tests are the row's `meta['tests']`, a list of asserts, or `meta['test']`, the source of unittest classes
    (BigCodeBench). A fault of the sandbox is missing; a program that fails is 0.
    """

    def __init__(self, sandbox: CodeRunner | None = None, cpu_seconds: float = 10.0, memory_mb: int = 1024) -> None:
        """Make the metric; the limits hold for one program with all its tests."""
        if sandbox is None:
            raise UserError("the metric 'pass_rate' needs a sandbox; the recipe's `sandbox` is 'local' or a URL")
        self.sandbox = sandbox
        self.cpu_seconds = cpu_seconds
        self.memory_mb = memory_mb

    async def score(self, conversation: Conversation) -> Score:
        """The share of tests passed; missing without tests, without a message, or where the sandbox fails."""
        last = conversation.last("assistant")
        if last is None:
            return Score.missing(Reason.NOTHING_SAID)
        setup, tests = tests_of(conversation.row)
        if not tests:
            return Score.missing(Reason.BAD_ROW, "pass_rate: no tests")
        fenced = last_fence(last.content)
        program = last.content if fenced is None else fenced
        if not program.strip():
            return Score(0.0, detail={"passed": 0, "tests": len(tests), "why": "no program"})
        from upshot.sandbox.limits import Limits

        limits = Limits(cpu_seconds=self.cpu_seconds, memory_mb=self.memory_mb)
        results = await self.sandbox.test_program(program + "\n" + setup, tests, limits)
        values = [result.value for result in results]
        outcomes = {"outcomes": [str(result.outcome) for result in results]}
        if not values or any(value is None for value in values):
            return Score.missing(Reason.SANDBOX_FAULT, "pass_rate: sandbox_fault", **outcomes)
        passed = sum(value or 0.0 for value in values)
        return Score(passed / len(values), detail={"passed": int(passed), "tests": len(values), **outcomes})


def tests_of(row: Row) -> tuple[str, list[str]]:
    """What is put after the program, and the asserts to run: given as such, or one per unittest method."""
    asserts = row.meta.get("tests")
    if asserts:
        return "", [str(test) for test in asserts]
    source = row.meta.get("test")
    if not isinstance(source, str) or not source.strip():
        return "", []
    methods = unittest_methods(source)
    return source + "\n" + _UNIT, [f"assert _upshot_unit({case!r}, {name!r})" for case, name in methods]


def unittest_methods(source: str) -> list[tuple[str, str]]:
    """(class, method) of every test in the source of unittest classes."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"the row's unit tests are not valid Python: {error}") from error
    found: list[tuple[str, str]] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("TestCase" in _name(base) for base in node.bases):
            functions = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            found += [(node.name, name) for name in functions if name.startswith("test")]
    return found


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
