# ruff: noqa: E501 (the programs are one line each)
"""Programs and tests: found in the reply, sent to the sandbox in their data set's format; sandbox faults are
missing."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tests.patience import patience
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.sandbox.inside.cases import standalone
from upshot.sandbox.outcome import Outcome, TestResult
from upshot.tasks.verifiers.base import verifiers
from upshot.tasks.verifiers.code import share_passed, stdio_pairs
from upshot.tasks.verifiers.programs import program_in

ADD = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


class Trusting:
    """A stand-in for the sandbox that runs these tests' own programs in this process."""

    def __init__(self, fault: bool = False) -> None:
        self.fault = fault
        self.seen: list[tuple[str, list[Any]]] = []

    def _result(self, good: bool) -> Any:
        if self.fault:
            return TestResult(Outcome.SANDBOX_FAULT, detail="gone")
        return TestResult(Outcome.PASSED if good else Outcome.WRONG, detail="" if good else "no")

    async def test_program(self, program: str, tests: list[str], *_: Any) -> list[Any]:
        self.seen.append((program, list(tests)))
        results = []
        for test in tests:
            names: dict[str, Any] = {}
            try:
                exec(program, names)
                exec(standalone(test), names)
                results.append(self._result(True))
            except Exception:
                results.append(self._result(False))
        return results

    async def test_stdio(self, program: str, tests: list[Any], *_: Any) -> list[Any]:
        self.seen.append((program, list(tests)))
        return [self._result(test.output == "3") for test in tests]


def check(name: str, response: str, reference: Any, extra: dict[str, Any] | None = None, **options: Any) -> Score:
    sandbox = options.pop("sandbox", None) or Trusting()
    verifier = verifiers.create(name, options, sandbox=sandbox)
    return asyncio.run(verifier.verify(response, reference, extra or {}))


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"), ("```\nx = 1\n```", "x = 1\n"), 
        ("```py\na\n```\n```python\nb\n```", "b\n"),
        ("```bash\nls\n```\n```python\nb\n```", "b\n"),
        ("def f():\n    pass", "def f():\n    pass"), ("I cannot.", None),
        ("```python\nunclosed = 1", "unclosed = 1"), ("```bash\nls\n```", None),
    ],
)  # fmt: skip
def test_the_program_is_found(text: str, program: str | None) -> None:
    assert program_in(text) == program


def test_asserts_come_as_a_list_as_json_or_in_a_column() -> None:
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 1"]
    for reference, extra in ((tests, {}), (json.dumps(tests), {}), (None, {"test_list": tests})):
        score = check("code", ADD, reference, extra)
        assert score.value == 0
        assert (score.detail["passed"], score.detail["tests"]) == (1, 2)
    assert check("code", ADD, tests, partial=True).value == 0.5
    assert check("code", ADD, tests[:1]).value == 1


def test_stdio_and_contest_rows_are_read() -> None:
    assert check("code-stdio", ADD, [{"input": "1 2", "output": "3"}]).value == 1
    assert check("code-stdio", ADD, json.dumps({"inputs": ["1", "2"], "outputs": ["3", "4"]})).value == 0
    extra = {"public_tests": {"input": ["a"], "output": ["3"]}, "private_tests": {"input": ["b"], "output": ["3"]}}
    score = check("code-contests", ADD, None, extra)
    assert (score.value, score.detail["tests"]) == (1, 2)
    assert stdio_pairs({"inputs": [["1", "2"]], "outputs": [["3"]]}) == [("1\n2", "3")]


def test_a_contest_solution_to_be_fixed_is_run_on_the_tests_of_its_row() -> None:
    extra = {"language": "python3", "test_inputs_outputs": {"input": ["a", "b"], "output": ["3", "3"]}}
    reply = f'### Test Inputs and Outputs\n```json\n{{"input": ["x"]}}\n```\n### Code\n{ADD}'
    assert check("code_contests_modify_code", reply, None, extra).value == 1
    other = check("code_contests_modify_code", reply, None, {**extra, "language": "cpp"})
    assert other.value == 0 and other.detail["fault"] == "no cpp program in the response"


def test_humaneval_and_bigcodebench_rows_are_read() -> None:
    stub = 'from typing import List\n\ndef add(a: int, b: int) -> int:\n    """Add."""\n'
    extra = {"stub": stub, "test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"}
    assert check("humaneval", ADD, None, extra).value == 1
    assert check("humaneval", "```python\n    return a + b\n```", None, extra).value == 1
    assert check("humaneval", "```python\n    return a - b\n```", None, extra).value == 0
    test = (
        "import unittest\nclass TestCases(unittest.TestCase):\n    def test_it(self):\n"
        "        self.assertEqual(add(1, 2), 3)"
    )
    assert check("bigcodebench", ADD, None, {"test": test}).value == 1
    assert check("bigcodebench", ADD.replace("+", "-"), None, {"test": test}).value == 0


def test_no_program_is_wrong_but_no_tests_or_a_fault_is_missing() -> None:
    tests = ["assert add(1, 2) == 3"]
    assert check("code", "I cannot do that.", tests).value == 0
    assert check("code", ADD, None).why == "code: no tests in the row"
    assert check("code", ADD, tests, sandbox=Trusting(fault=True)).reason == "sandbox_fault"


def test_tests_that_cannot_fail_do_not_count() -> None:
    class Telling(Trusting):
        async def test_program(self, program: str, tests: list[str], *_: Any) -> list[Any]:
            invalid = TestResult(Outcome.INVALID_TEST, detail="it checks nothing")
            return [self._result(True) if "assert" in test else invalid for test in tests]

    assert check("code", ADD, ["x = 1", "assert add(1, 2) == 3"], sandbox=Telling()).value == 1
    assert check("code", ADD, ["x = 1"], sandbox=Telling()).reason == "bad_row"


def test_a_reply_of_many_code_fences_is_read_in_linear_time() -> None:
    started = time.process_time()
    for text in ("```" * 60_000, "```" + "a" * 190_000, "```\n" * 50_000, "\n" * 190_000):
        program_in(text)
        check(
            "humaneval", f"```python\n{text}\n```", None, {"test": "x", "entry_point": "add", "stub": "def add(): ..."}
        )
    assert time.process_time() - started < patience(5)  # CPU seconds; anything quadratic takes minutes


def test_the_number_of_tests_is_bounded() -> None:
    sandbox = Trusting()
    check("code", ADD, ["assert add(1, 2) == 3"] * 500, sandbox=sandbox, max_tests=7)
    assert len(sandbox.seen[0][1]) == 7


def test_without_a_sandbox_there_is_one_clear_error() -> None:
    with pytest.raises(UserError, match="in a sandbox"):
        asyncio.run(verifiers.create("code").verify(ADD, ["assert True"], {}))


def test_the_real_sandbox_gives_the_same_verdicts() -> None:
    connection = pytest.importorskip("upshot.sandbox.connection")

    async def run() -> list[float | None]:
        runner = connection.connect("local")
        try:
            code = verifiers.create("code", sandbox=runner)
            stdio = verifiers.create("code-stdio", sandbox=runner)
            human = verifiers.create("humaneval", sandbox=runner)
            read = "```python\nprint(sum(map(int, input().split())))\n```"
            extra = {"test": "def check(candidate):\n    for n in range(3):\n        assert candidate(n, 1) == n + 1",
                     "entry_point": "add"}  # fmt: skip
            quit_early = "```python\nimport os\nos._exit(0)\n```"
            return [
                (await code.verify(ADD, ["assert add(1, 2) == 3"], {})).value,
                (await code.verify(ADD, ["assert add(1, 2) == 4"], {})).value,
                (await stdio.verify(read, [{"input": "1 2", "output": "3"}], {})).value,
                (await stdio.verify(read, [{"input": "1 2", "output": "4"}], {})).value,
                (await human.verify(ADD, None, extra)).value,
                (await human.verify(quit_early, None, extra)).value,
            ]
        finally:
            await runner.aclose()

    assert asyncio.run(run()) == [1, 0, 1, 0, 1, 0]


def test_the_block_that_defines_what_the_tests_name_is_the_program() -> None:
    usage = "```python\ndef add(a, b):\n    return a + b\n```\nUse it so:\n```python\nprint(add(1, 2))\n```"
    assert program_in(usage, {"add", "assert"}) == "def add(a, b):\n    return a + b\n"
    assert (
        program_in(usage) == "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n"
    )  # the last one, and what it needs
    mended = "```python\ndef add(a, b):\n    return a - b\n```\nNo:\n```python\ndef add(a, b):\n    return a + b\n```"
    assert program_in(mended, {"add"}) == "def add(a, b):\n    return a + b\n"
    assert check("code", usage, ["assert add(1, 2) == 3"]).value == 1
    reads = "```python\nn = int(input())\nprint(n)\n```\nAn example:\n```python\nx = 3\n```"
    assert program_in(reads, {"input", "stdin"}) == "n = int(input())\nprint(n)\n"


@pytest.mark.parametrize(
    ("source", "row"),
    [
        ("apps", {"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3, [4]]})}),
        ("taco", {"input_output": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}}),
        ("livecodebench", {"tests": 0, "metadata": '{"func_name": "add"}'}),
    ],
)
def test_function_style_rows_run_the_function(source: str, row: dict[str, Any]) -> None:
    reference = json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]) if "tests" in row else None
    for program in (
        "def add(a, b):\n    return a + b",
        "class Solution:\n    def add(self, a, b):\n        return a + b",
    ):
        assert check(source, f"```python\n{program}\n```", reference, extra=row).value == 1, program
        wrong = program.replace("a + b", "a - b")
        assert check(source, f"```python\n{wrong}\n```", reference, extra=row).value == 0


def test_an_unconfirmed_pass_is_a_failure_and_a_believed_one_a_pass_and_both_are_counted() -> None:
    unconfirmed = share_passed([TestResult(Outcome.PASSED), TestResult(Outcome.UNCONFIRMED, detail="why")], "code")
    assert unconfirmed.value == 0.5 and unconfirmed.detail["unconfirmed"] == 1
    assert unconfirmed.detail["first_failure"] == "why" and "believed" not in unconfirmed.detail
    believed = share_passed([TestResult(Outcome.UNCONFIRMED).believe()], "code")
    assert believed.value == 1 and believed.detail["believed"] == 1 and "unconfirmed" not in believed.detail


def test_a_row_without_a_check_that_works_is_missing() -> None:
    assert share_passed([], "code").reason == "bad_row"


STACK = """class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def total(self): return sum(self.items)
"""
CHAINED = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertIs(s := Stack(), s.push(3))\n    def test_b(self):\n        s = Stack()\n        s.push(3)\n        s.push(4)\n        self.assertEqual(s.total(), 7)"
LIAR = """class Seven(int):
    def __eq__(self, other): return True
class Stack:
    def push(self, x): return self
    def total(self): return Seven(1)
"""


def test_class_rows_are_decided_by_their_profile_in_the_real_sandbox() -> None:
    connection = pytest.importorskip("upshot.sandbox.connection")
    row = {"test": CHAINED, "solution_code": STACK, "task_id": "stack"}
    tuples = STACK.replace("[]", "()").replace("self.items.append(x)", "self.items += (x,)")
    wrong = STACK.replace("return sum(self.items)", "return len(self.items)")

    async def run() -> list[Score]:
        async with connection.connect("local:slots=2") as runner:
            verifier = verifiers.create("classeval", {}, sandbox=runner)
            return [await verifier.verify(f"```python\n{text}```", None, row) for text in (STACK, tuples, wrong, LIAR)]

    reference, other, failing, lying = asyncio.run(run())
    assert [reference.value, other.value, failing.value, lying.value] == [1, 1, 0, 0]
    assert reference.detail["believed"] == 1 and lying.detail["unconfirmed"] == 1


def test_a_corrected_solution_comes_with_tests_and_a_wrong_test_costs() -> None:
    right, wrong = "print(int(input()) + 1)", "print(int(input()) - 1)"
    truth = {"input": ["1", "5"], "output": ["2", "6"]}
    extra: dict[str, Any] = {"language": "python3", "test_inputs_outputs": truth}
    extra |= {"correct_solutions": [right, right], "incorrect_solutions": {"solution": [wrong]}}

    class Adding(Trusting):
        """Runs programs that add to the number they read, or subtract from it."""

        async def test_stdio(self, program: str, tests: list[Any], *_: Any) -> list[Any]:
            change = 1 if "+ 1" in program else -1
            return [self._result(str(int(test.input) + change) == test.output) for test in tests]

    def scored(tests: str, code: str) -> Any:
        reply = f"### Test Inputs and Outputs\n```json\n{tests}\n```\n### Code\n```python\n{code}\n```"
        return check("code_contests_modify_code", reply, None, extra, sandbox=Adding())

    good = scored('{"input": ["3"], "output": ["4"]}', right)
    assert good.value == 1
    names = ("code_pass_gt_test", "code_pass_generated_test", "test_pass_correct_sol", "test_pass_incorrect_sol")
    assert [good.detail[f"generated_{name}"] for name in names] == [1, 1, 1, 0]
    bad_test = scored('{"input": ["3"], "output": ["2"]}', right)
    assert bad_test.value == 0 and bad_test.detail["generated_code_pass_gt_test"] == 1
    assert bad_test.detail["generated_test_pass_incorrect_sol"] == 1
    assert scored("not json", right).value == 0 and scored('{"input": ["3"], "output": ["4"]}', wrong).value == 0
