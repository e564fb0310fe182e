"""Rows that call a function: results are compared as JSON, fractions to a millionth, by the real sandbox."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.tasks.verifiers.test_code import check
from upshot.sandbox import Limits, Sandbox
from upshot.tasks.verifiers.base import verifiers
from upshot.tasks.verifiers.function_rows import FunctionCall, with_imports

INF, NAN = float("inf"), float("nan")


def row(arguments: list[Any], result: Any) -> dict[str, Any]:
    return {"input_output": json.dumps({"fn_name": "f", "inputs": [arguments], "outputs": [result]})}


RIGHT: list[tuple[str, list[Any], Any]] = [
    (
        "class Solution:\n    def solve(self, x):\n        return 2 * x\ndef f(x):\n    return Solution().solve(x)",
        [3],
        6,
    ),
    ("class Solution:\n    def f(self, x):\n        return 2 * x\nprint(Solution().f(1))", [3], 6),
    ("def f(xs):\n    return max(xs, default=float('-inf'))", [[]], -INF),
    ("def f(xs):\n    return max(xs)", [[1, INF]], INF),
    ("def f(x):\n    return [x, x - x]", [INF], [INF, NAN]),
    ("def f(xs):\n    return '[' + ','.join(map(str, xs)) + ']'", [[1, 2]], "[1,2]"),
    ("def f(xs):\n    return xs", [[1, 2]], "[1, 2]"),
    ("def f(x):\n    return {'a': (x, [(x,)])}", [1], {"a": [1, [[1]]]}),
    ("def f(x):\n    return {x: {2: x}}", [1], {"1": {"2": 1}}),
    ("def f(x):\n    return x / 3", [1], 0.3333333333),
    ("def f(x):\n    return x * 1e9 / 3", [1], 333333333.0),
    ("def f(x):\n    return [x / 3, (x * 0.1,)]", [3], [1.0, [0.3]]),
    ("def f(x):\n    return x / 3", [1], [0.333333333]),
    ("def f(x):\n    return x", [2], 2.0),
    ("dict = str = len = all = map = float = max = 0\ndef f(x):\n    return [(x, {'a': x})]", [1], [[1, {"a": 1}]]),
]
WRONG: list[tuple[str, list[Any], Any]] = [
    ("def f(x):\n    return 0.3334", [1], 0.3333333333), ("def f(x):\n    return 'inf'", [1], INF),
    ("def f(x):\n    return [1.0]", [1], [1.0, 2.0]), ("def f(x):\n    return [1.0, 2.0, 3.0]", [1], [1.0, 2.0]),
    ("def f(x):\n    return {1: 1, '1': 1}", [1], {"1": 1}), ("def f(x):\n    return {1: 2}", [1], {"1": 1}),
    ("def f(x):\n    return {}", [1], {"1": 1}), ("def f(x):\n    return '[1, 3]'", [1], "[1,2]"),
    ("def f(x):\n    return None", [1], NAN), ("def f(x):\n    return 1000001", [1], 1000000),
    ("class A(list):\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return A()", [1], [6]),
    ("class A(dict):\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return A()", [1], {"a": 1}),
]  # fmt: skip


def test_apps_results_are_compared_as_json() -> None:
    async def run() -> list[float | None]:
        async with Sandbox(slots=1, limits=Limits(cpu_seconds=4)) as sandbox:
            apps = verifiers.create("apps", sandbox=sandbox)
            table = [(f"```python\n{program}\n```", row(given, wanted)) for program, given, wanted in RIGHT + WRONG]
            return [(await apps.verify(text, None, extra)).value for text, extra in table]

    assert asyncio.run(run()) == [1] * len(RIGHT) + [0] * len(WRONG)


def test_whole_numbers_and_texts_become_plain_asserts() -> None:
    assert FunctionCall("f", [1, "a"], 3).as_assert("") == "assert f(1, 'a') == 3"
    assert FunctionCall("f", [NAN], "inf").as_assert("") == "assert f(float('nan')) == 'inf'"


def test_modules_that_graders_of_function_rows_import_are_available() -> None:
    tests = json.dumps([{"input": "[3, 1]", "output": "4", "testtype": "functional"}])
    extra = {"metadata": json.dumps({"func_name": "f"})}
    program = (
        "class Solution:\n    def f(self, xs: List[int]) -> Optional[int]:\n        heapify(xs)\n"
        "        seen: Dict = defaultdict(int)\n        at = bisect.bisect_left(xs, 1) + bisect_left(xs, 1)\n"
        "        return sum(islice(accumulate(xs), at + 1, 2)) + floor(math.log(1)) + len(seen)"
    )
    assert check("livecodebench", f"```python\n{program}\n```", tests, extra).value == 1
    assert check("livecodebench", f"```python\n{program.replace('floor', 'flor')}\n```", tests, extra).value == 0


def test_only_missing_modules_are_imported() -> None:
    whole = "import math\ndef f(List):\n    return math.floor(List)"
    assert with_imports(whole) == whole
    assert with_imports("def f(x: List):\n    return sqrt(x)") == (
        "from typing import List; from math import sqrt\ndef f(x: List):\n    return sqrt(x)"
    )
    for odd in ("from __future__ import annotations\nx: List = []", "def f(:", "unheard_of()"):
        assert with_imports(odd) == odd


@pytest.mark.parametrize("result", [[1.5], "[1, 2]", {"1": 1}, INF])
def test_a_prepared_apps_row_has_the_same_tests(result: Any) -> None:
    apps: Any = verifiers.get("apps")
    truth = apps.ground_truth(None, row([1], result))
    assert apps().tests(truth, {}) == apps().tests(None, row([1], result))
