# ruff: noqa: E501 (the programs are one line each)
"""Verdicts are computed outside the sandbox: splitting tests, sending and comparing values, and the judge."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, OrderedDict, deque, namedtuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import patience
from tests.support import humaneval
from upshot.core.errors import UserError
from upshot.sandbox import Limits, Outcome, StdioTest
from upshot.sandbox.asserts.values import Check, holds, split
from upshot.sandbox.asserts.verdict import Remains, of_calls, parse_lines, same_output
from upshot.sandbox.inside import plain
from upshot.sandbox.local.pool import tier_of

INVALID = Outcome.INVALID_TEST
PASSED, WRONG, ERROR, TIMEOUT = Outcome.PASSED, Outcome.WRONG, Outcome.ERROR, Outcome.TIMEOUT
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
    ),
    max_leaves=12,
)


def carried(value: Any) -> Any:
    """A value after the trip through JSON text."""
    return json.loads(json.dumps(plain.encode(value)))


def compared(value: Any, expected: Any) -> bool | None:
    """The supervisor's result for a value that the program's process sends, if that is expected."""
    data = json.loads(json.dumps(plain.sort(plain.encode(value))))
    return holds(Check("f()", "eq", plain.sort(plain.encode(expected))), data)


@given(VALUES)
@settings(deadline=None, max_examples=200)
def test_data_leaves_the_sandbox_unchanged(value: Any) -> None:
    assert plain.decode(carried(value), lambda *_: None) == value
    assert compared(value, value) is True


@given(VALUES, VALUES)
@settings(deadline=None, max_examples=300)
def test_comparing_outside_gives_pythons_equality_or_leaves_it_to_the_other_checks(value: Any, other: Any) -> None:
    assert compared(value, other) in (value == other, None)
    has_tags = "{" in json.dumps([carried(value), carried(other)])
    assert has_tags or compared(value, other) is not None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1),
        (1.0, 1),
        ({"b": 1, "a": [2]}, {"a": [2], "b": 1}),
        ({(2, 3), (1, 2)}, {(1, 2), (2, 3)}),
        (7**900, 7**900),
        (float("inf"), float("inf")),
        ("\ud800", "\ud800"),
    ],
)
def test_equal_values_match(value: Any, expected: Any) -> None:
    assert compared(value, expected) is True


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (deque([1]), [1]),
        ((1,), [1]),
        ([1], (1,)),
        (range(2), [0, 1]),
        (float("nan"), float("nan")),
        ({1: 2}, {1: 3}),
        ({1, 2}, {1, 3}),
    ],
)
def test_unequal_values_do_not_match(value: Any, expected: Any) -> None:
    assert compared(value, expected) is not True


@pytest.mark.parametrize(("value", "expected"), [(frozenset({1}), {1}), ({1.0, 2}, {1, 2.0}), (2.0**64, 2**64)])
def test_values_that_may_be_equal_in_another_form_are_left_to_the_other_checks(
    value: Any, expected: Any, box: Any
) -> None:
    assert value == expected and compared(value, expected) is not False
    assert box(box.sandbox.test_program(f"def f(): return {value!r}", [f"assert f() == {expected!r}"]))[0].passed


@pytest.mark.parametrize(
    "value", [OrderedDict(a=1), Counter("aab"), namedtuple("P", "x y")(1, 2), deque([1]), range(2), 1j, [object()]]
)
def test_values_that_literals_cannot_express_are_left_to_the_other_checks(value: Any) -> None:
    (check,) = split("assert f() == 3") or []
    assert holds(check, carried(value)) is None


@pytest.mark.parametrize(
    ("test", "calls"),
    [
        ("assert f(1) == 2", ["f(1)"]),
        ("assert 2 == f(1)", ["f(1)"]),
        ("assert (f(1) == [1, {'a': (2,)}]), 'message'", ["f(1)"]),
        ("assert f(1) == 2; assert f(2) != -3", ["f(1)", "f(2)"]),
        ("assert f(1) is None", ["f(1)"]),
        ("assert f(lambda x: x == 3) == 2", ["f(lambda x: x == 3)"]),
        ("assert Solution(3).f(1) == 2", ["Solution(3).f(1)"]),
        ("assert f([1] * 3, key=len, xs=(x for x in 'ab')) == 2", ["f([1] * 3, key=len, xs=(x for x in 'ab'))"]),
        ("assert f(\n    1,\n) == 2", ["f(1)"]),
        ("assert f(1)", ["f(1)"]),
        ("import math\nfrom a import b\nassert f(math.pi) == 2", ["f(math.pi)"]),
        ("assert not f(1)", ["f(1)"]),
    ],
)
def test_an_assert_is_split_into_call_and_expectation(test: str, calls: list[str]) -> None:
    checks = split(test)
    assert checks is not None and [check.call for check in checks] == calls


@pytest.mark.parametrize(
    "test",
    [
        "assert (f(1) == 3) == True",
        "assert f(1) - 3 == 0",
        "assert abs(f(1) - 3) == 0",
        "assert abs(f(1) - 3) < 1e-6",
        "assert math.isclose(f(1), 3)",
        "assert isclose(f(1), 3)",
        "assert math.isclose(f(1), 3) == True",
        "assert all(f(i) == i for i in range(3))",
        "assert f(1) == g(1)",
        "assert f(1) == 2 ** 3",
        "assert isinstance(f(1), int)",
        "from x import close\nassert close(f(1), 3)",
        "import y as z\nassert z.close(f(1), 3)",
        "assert f(1).startswith('a')",
        "assert sorted(f(1)).count(3) == 1",
        "assert Solution().f(1).find('x') == 2",
        "import math",
        "x = f(1)",
        "for i in range(3):\n    assert f(i) == i",
        "assert f(1) ==",
        "",
        "assert Solution().f(1)[0].x == 2",
        "assert not f(g(1))",
        "assert f(LIMIT) == 2",
        "assert sorted(f(1)) == [1]",
        "assert round(f(1), 2) == 0.33",
        "assert sum(a == b for a, b in zip(f(3), [10, 20, 30])) == 3",
        "assert len(set(f(3)).symmetric_difference({1, 2})) == 0",
        "import math\nassert math.dist(f(3), (1, 2)) == 0",
        "assert (lambda r: r == 28.27)(f(3))",
        "assert {1017, 2034}.issubset(f(3))",
        "assert f(3).g(4) == 1",
        "assert thing.g(4) == 1",
    ],
)
def test_an_assert_that_would_show_the_expectation_goes_to_the_judge(test: str) -> None:
    assert split(test) is None


def test_an_unreadable_result_is_an_error_and_not_a_crash() -> None:
    checks = [split("assert f() == 1") or []]
    for data in (
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"v":1}',
        b'{"v":[]}',
        b'{"v":[{"zz":1}]}',
        b'{"v":[{"a":1,"b":2}]}',
        b"[" * 100000,
        b'{"t":"x","v":[1]}',
        b"\xff",
    ):
        (result,) = of_calls(checks, Remains(lines=parse_lines(data)))
        assert result is None or result.outcome in (ERROR, WRONG), data  # None: left to the other checks


@pytest.mark.parametrize(
    "value",
    [
        '{"D":"sNaN"}',
        '{"D":"NaN"}',
        '{"D":"1E+999999999"}',
        '{"D":"' + "7" * 900_000 + '"}',
        '{"F":[1,0]}',
        '{"F":[1,-1]}',
        '{"F":[{"i":"' + "7" * 490_000 + '"},{"i":"' + "3" * 490_000 + '"}]}',
        '{"d":[[' + '{"F":[1,0]}' + ",1]]}",
        '{"s":[{"t":[{"f":[' + ",".join(str(i * (2**61 - 1)) for i in range(3)) + "]}]}]}",
        '{"d":[' + ",".join(f"[{i * (2**61 - 1)},0]" for i in range(30_000)) + "]}",
        '{"s":[{"t":[{"f":[' + ",".join(str(i * (2**61 - 1)) for i in range(40_000)) + "]}]}]}",
        "[" + ",".join(["1e308"] * 50_000) + "]",
        "[" * 900 + "]" * 900,
        '{"T":[1]}',
        '{"r":[0,1,0]}',
        '{"i":{}}',
        '{"c":[null,null]}',
    ],
)
@pytest.mark.parametrize("test", ["assert f() == 3", "assert f()", "assert f() == {3: 1}", "assert f() == {(3,)}"])
def test_whatever_a_program_returns_is_at_worst_its_own_failure(value: str, test: str) -> None:
    checks = [split(test) or []]
    started = time.process_time()
    (result,) = of_calls(checks, Remains(lines=parse_lines(b'{"v":[' + value.encode() + b'],"t":0}')))
    assert result is None or result.value == 0 or test == "assert f()"
    assert time.process_time() - started < patience(5)  # CPU seconds; anything quadratic takes minutes


def test_every_text_is_read_in_linear_time() -> None:
    started = time.process_time()
    assert tier_of("\n" * 200_000 + "x") == tier_of(" " * 200_000) == "plain"
    assert split("assert f() == [" + "1, " * 1_000_000 + "]") is None
    assert split("assert f(" + "1 + " * 5_000 + "g(1)) == 1") is None
    assert time.process_time() - started < patience(5)  # CPU seconds; anything quadratic takes minutes


def test_a_sandbox_fault_is_missing_instead_of_zero() -> None:
    results = of_calls([split("assert f() == 1") or []], Remains(fault="no zygote"))
    assert results[0].outcome is Outcome.SANDBOX_FAULT and results[0].value is None and results[0].detail == "no zygote"


def test_output_is_compared_without_trailing_space() -> None:
    assert same_output("1 \n2\n\n", "1\n2") and not same_output("1\n2", "12") and not same_output(" 1", "1 2")


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1000000000.0", "999999937", False),
        ("10.0", "10", False),
        ("1e3", "1000", False),
        ("10", "10", True),
        ("0.33333334", "0.33333333", True),
        ("2", "2.0", True),
        ("2.5", "2.50000049", True),
        ("2.6", "2.5", False),
        ("nan", "2.5", False),
    ],
)
def test_whole_numbers_are_compared_exactly_and_decimal_fractions_to_a_millionth(
    printed: str, expected: str, same: bool
) -> None:
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("source", "tier"),
    [
        ("x = 1", "plain"),
        ("# numpy", "plain"),
        ("import numpy as np", "numpy"),
        ("def f():\n    from numpy import array", "numpy"),
        ("import math, scipy.stats", "scientific"),
    ],
)
def test_the_lightest_tier_with_the_imports_is_taken(source: str, tier: str) -> None:
    assert tier_of(source) == tier


def outcomes(box: Any, program: str, tests: list[str], given: str = "", **limits: Any) -> list[Outcome]:
    asked = Limits(cpu_seconds=1.0, **limits) if limits else None
    return [result.outcome for result in box(box.sandbox.test_program(program, tests, asked, given))]


JUDGED = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __eq__(self, o): return isinstance(o, Stack) and o.items == self.items
    def __add__(self, o):
        new = Stack(); new.items = self.items + (o.items if isinstance(o, Stack) else [o]); return new
class Custom(ValueError): pass
def fail(x):
    if x < 0: raise Custom('negative')
    if x == 0: raise KeyError('zero')
    return x
def reverse_in_place(xs): xs.reverse()
def apply(f, xs): return [f(x) for x in xs]
def count(n):
    for i in range(n): yield i
def third(): return 1 / 3
LIMIT = 7
"""


@pytest.mark.parametrize(
    "test",
    [
        "s = Stack()\ns.push(1)\ns.push(2)\nassert len(s) == 2\nassert s.pop() == 2\nassert list(s) == [1]",
        "import statistics\nassert LIMIT == 7 and statistics.mean([third(), 1]) == 2 / 3",
        "try:\n    fail(-1)\nexcept ValueError as e:\n    assert 'negative' in str(e)",
        "try:\n    fail(0)\n    assert False\nexcept KeyError:\n    pass",
        "assert set(count(3)) == {0, 1, 2} and sum(count(4)) == 6",
        "import math\nassert math.isclose(third(), 0.3333333333)",
        "assert abs(third() - 0.333333333) < 1e-6",
        "def check(candidate):\n    for i in range(1, 5):\n        assert candidate(i) == i\ncheck(fail)",
        "assert third() in (1, 1 / 3)",
    ],
)
def test_the_judge_passes_honest_programs(test: str, box: Any) -> None:
    assert outcomes(box, JUDGED, [test]) == [PASSED]


@pytest.mark.parametrize(
    "test",
    [
        "s = Stack()\nassert s.push(1) is s",
        "xs = [1, 2, 3]\nreverse_in_place(xs)\nassert xs == [3, 2, 1]",
        "try:\n    fail(-1)\nexcept Custom:\n    pass\nelse:\n    assert False",
        "found = apply(str, [2, 1])\nfound.sort()\nassert found == ['1', '2']",
        "s = Stack()\nheld = s.items\ns.push(3)\nassert held == [3]",
        "xs = [1, 2]\ns = Stack()\ns.items = xs\ns.push(3)\nassert xs == [1, 2, 3]",
        "s = Stack()\nassert s.push(1).push(2).pop() == 2",
        "assert Stack() == Stack()",
        "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and LIMIT == 7",
        "s = Stack()\ns.items.append(3)\nassert s.pop() == 3",
        "xs = [2, 1]\ns = Stack()\ns.items = xs\nxs.append(3)\nassert s.pop() == 3",
        "assert type(Stack()).__name__ == 'Stack'",
        "assert callable(fail)",
        "import random\nrandom.seed(0)\nassert third() > 0",
    ],
)
def test_properties_that_copies_of_data_cannot_show_are_unconfirmed(test: str, box: Any) -> None:
    result = box(box.sandbox.test_program(JUDGED, [test]))[0]
    assert result.outcome is Outcome.UNCONFIRMED and result.value is None and result.detail, result


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("x = fail(2)\nassert x == 3", WRONG),
        ("assert abs(third() - 0.4) < 1e-6", WRONG),
        ("assert missing(1) == 2 ** 1", ERROR),
        ("x = fail(-1)", ERROR),
        ("assert Stack() == []", WRONG),
        ("xs = [1, 2]\nreverse_in_place(xs)\nassert xs == [1, 2]", WRONG),
    ],
)
def test_the_judge_fails_what_is_wrong(test: str, outcome: Outcome, box: Any) -> None:
    assert outcomes(box, JUDGED, [test]) == [outcome]


def test_state_is_shared_between_tests_of_one_program(box: Any) -> None:
    tests = ["s = Stack()", "s.push(4)", "assert s.pop() == 4", "assert len(s) == 0"]
    assert outcomes(box, JUDGED, tests) == [INVALID, INVALID, PASSED, PASSED]


def test_outcomes_are_distinguished(box: Any) -> None:
    program = "import time\ndef f(x):\n    if x == 1: return 1\n    if x == 2: raise ValueError('two')\n    if x == 3: return bytearray(1 << 40)\n    while True: pass"
    tests = [f"assert f({x}) == 1" for x in (1, 2, 3, 4, 1)]
    results = box(box.sandbox.test_program(program, tests))
    assert [r.outcome for r in results] == [PASSED, ERROR, Outcome.OUT_OF_MEMORY, TIMEOUT, TIMEOUT]
    assert "ValueError: two" in results[1].detail and "line 4" in results[1].detail
    assert [r.value for r in results] == [1, 0, 0, 0, 0]


def test_nested_results_are_compared_in_linear_time() -> None:
    data: Any = ["x" * 4000] * 100
    for _ in range(190):
        data = {"t": [{"s": [data, 1]}, 2]}
    checks = [split("assert f() == 3") or []]
    started = time.process_time()
    assert of_calls(checks, Remains(lines=[{"v": [data], "t": 0}])) == [None]
    assert time.process_time() - started < patience(0.5)  # CPU seconds; it was six when whole texts were nested


def test_the_notes_on_tests_are_out_of_the_programs_reach(box: Any) -> None:
    program = 'import os\nfor fd in range(3, 64):\n    try:\n        os.lseek(fd, 0, 0)\n        os.write(fd, b\'{"faults":[[0,"x"]],"doubts":[[0,"x"]]}\')\n    except OSError: pass\ndef f(): return 1'
    (result,) = box(box.sandbox.test_program(program, ["assert abs(f()) == 2"]))
    assert result.value == 0, result


def test_an_object_of_a_subclass_is_the_data_that_it_is_made_of(box: Any) -> None:
    program = """
import collections, enum
class Rows(list):
    def __eq__(self, other): return True
class Color(enum.IntEnum):
    RED = 1
class Bag(list):
    def push(self, x): self.append(x)
def rows(): return Rows([1, 2])
def counts():
    found = collections.defaultdict(int)
    found['a'] += 1
    return found
def color(): return Color.RED
"""
    tests = [
        "assert [1, 2] == rows() and len(rows()) == 2",
        "assert rows() == [3] and len(rows()) == 2",
        "assert counts() == {'a': 1} and color() == 1",
        "b = Bag()\nb.push(3)\nassert len(b) == 1 and list(b) == [3]",
    ]
    assert outcomes(box, program, tests) == [PASSED, Outcome.UNCONFIRMED, PASSED, PASSED]


def test_a_doubt_raised_while_a_test_catches_exceptions_remains(box: Any) -> None:
    lying = "class E:\n    def __eq__(self, o): return True\ndef f(x): return E()"
    test = "try:\n    good = f(3) == 9\nexcept BaseException:\n    good = True\nxs = [1]\nxs.append(2)\nassert good"
    assert outcomes(box, lying, [test]) == [Outcome.UNCONFIRMED]


def test_imports_and_helpers_of_the_row_belong_to_the_judge(box: Any) -> None:
    given = "def close(a, b):\n    return abs(a - b) < 1e-6\n"
    lying = given + "close = lambda a, b: True\ndef f(x): return 0"
    test = "assert close(f(3), 9)"
    assert outcomes(box, lying, [test], given) == outcomes(box, lying, [test]) == [Outcome.UNCONFIRMED]
    assert outcomes(box, given + "def f(x): return x * x", [test], given) == [PASSED]


def test_a_program_that_draws_random_numbers_is_the_same_in_both_checks(box: Any) -> None:
    program = "import random\ndef f(): return random.random()"
    test = "import collections\nassert f() != f() and collections.Counter([f() < 0.5])[True] in (0, 1)"
    assert outcomes(box, program, [test]) == [PASSED]


def test_a_program_that_does_not_load_fails_every_test(box: Any) -> None:
    results = box(box.sandbox.test_program("def f(:", ["assert f() == 1", "assert f() == 2"]))
    assert [r.outcome for r in results] == [ERROR, ERROR] and "SyntaxError" in results[0].detail


def test_imports_of_a_test_are_available_to_its_call(box: Any) -> None:
    tests = ["import math\nassert f(math.floor(2.5)) == 2", "from math import ceil as up\nassert f(up(2.5)) == 4"]
    assert outcomes(box, "def f(x):\n    return x", tests) == [PASSED, WRONG]


def test_without_tests_there_are_no_results(box: Any) -> None:
    assert outcomes(box, "x = 1", []) == []


@pytest.mark.parametrize(
    "program",
    [
        "# os.system eval exec import\nprint(int(input()) + 1)",
        "import sys\nfor line in sys.stdin:\n    print(int(line) + 1)",
        "print(int(open(0).read()) + 1)",
        "import sys\nsys.stdout.buffer.write(str(int(sys.stdin.buffer.read()) + 1).encode())",
        "global x\nx = int(input())\nprint(x + 1)",
        "import numpy as np\nprint(int(np.array([int(input())])[0]) + 1)",
        "def main():\n    print(int(input()) + 1)\nif __name__ == '__main__':\n    main()",
        "import sys\nprint(int(sys.stdin.readline()) + 1)\nsys.exit(0)",
        "import os\nos.write(1, str(int(os.read(0, 99)) + 1).encode())",
        "import threading\nthreading.Thread(target=lambda: print(int(input()) + 1)).start()",
        "import atexit\nx = int(input())\natexit.register(lambda: print(x + 1))",
        "import atexit, io, sys\nsys.stdout = io.StringIO()\natexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint(int(input()) + 1)",
        "out = open(1, 'w')\nprint(int(input()) + 1, file=out)",
        "class Late:\n    def __del__(self): print(self.number)\nlate = Late()\nlate.number = int(input()) + 1",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(int(input())).x + 1)",
        "import subprocess\nprint(int(subprocess.run(['cat'], capture_output=True, text=True).stdout) + 1)",
        "from multiprocessing import Pool\ndef f(x):\n    return x + 1\nif __name__ == '__main__':\n    with Pool(2) as p:\n        print(p.map(f, [int(input())])[0])",
        "import asyncio\nasync def main():\n    print(int(input()) + 1)\nasyncio.run(main())",
        "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n    f.write(input())\n    f.seek(0)\n    print(int(f.read()) + 1)",
    ],
)
def test_honest_programs_of_every_style_pass(program: str, box: Any) -> None:
    if "process" in program and box.sandbox.layers.namespaces is None:
        pytest.skip("without namespaces programs start no processes")
    results = box(
        box.sandbox.test_stdio(program, [StdioTest("41\n", "42\n"), StdioTest("1", "2")], Limits(cpu_seconds=5))
    )
    assert [r.outcome for r in results] == [PASSED, PASSED], results


def test_stdio_tests_have_the_right_outcomes(box: Any) -> None:
    async def one(program: str) -> Outcome:
        return (await box.sandbox.test_stdio(program, [StdioTest("1", "2")]))[0].outcome

    assert box(one("print(3)")) is WRONG
    assert box(one("1 / 0")) is ERROR
    assert box(one("print(2); raise SystemExit(3)")) is ERROR
    assert box(one("while True: pass")) is TIMEOUT
    assert box(one("while True: print('x' * 1000)")) is Outcome.OUTPUT_LIMIT
    assert box(one("bytearray(1 << 40)")) is Outcome.OUT_OF_MEMORY


def test_two_runs_have_different_random_numbers(box: Any) -> None:
    for program in (
        "import random; print(random.random())",
        "import numpy as np; print(np.random.rand())",
        "import uuid; print(uuid.uuid4())",
    ):
        limits = Limits(cpu_seconds=20, wall_seconds=patience(20))
        first, second = (box(box.sandbox.run(program, limits=limits)) for _ in range(2))
        assert first.stdout and first.stdout != second.stdout


def test_millions_of_result_lines_are_not_read() -> None:
    started = time.process_time()
    assert len(parse_lines(b"{}\n" * 1_000_000, 8)) == 8
    assert time.process_time() - started < patience(0.5)


def test_long_output_is_cut_with_a_flag(box: Any) -> None:
    result = box(box.sandbox.run("print('x' * 500_000)"))
    assert result.outcome is Outcome.OUTPUT_LIMIT and result.stdout_cut and len(result.stdout) == 256 << 10
    assert not box(box.sandbox.run("print('x' * 1000)")).stdout_cut


def test_limits_must_make_sense() -> None:
    with pytest.raises(UserError, match="memory_mb is 0"):
        Limits(memory_mb=0)
    with pytest.raises(UserError, match="at least 64"):
        Limits(open_files=3)


def test_humaneval_references_pass_and_stubs_fail(box: Any) -> None:
    problems = humaneval.load(Path(__file__).with_name("humaneval_rows.jsonl"))
    assert len(problems) == 6 and problems[0].tests == ("assert double(2) == 4", "assert double(-1) == -2")
    for problem in problems:
        assert set(outcomes(box, problem.reference, list(problem.tests), problem.given)) == {PASSED}, problem.name
        assert PASSED not in outcomes(box, problem.stub, list(problem.tests))[:1], problem.name


def test_all_humaneval_references_pass_and_stubs_fail(box: Any) -> None:
    path = os.environ.get("UPSHOT_HUMANEVAL")
    if not path:
        pytest.skip("set UPSHOT_HUMANEVAL to the public HumanEval.jsonl.gz")
    problems = humaneval.load(path)
    for problem in problems:
        asked = {"memory_mb": 512, "wall_seconds": 30.0}
        found = outcomes(box, problem.reference, list(problem.tests), problem.given, **asked)
        assert set(found) == {PASSED}, problem.name
        assert set(outcomes(box, problem.stub, list(problem.tests), **asked)) != {PASSED}, problem.name
    assert len(problems) == 164


def test_a_humaneval_row_without_tests_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"task_id": "a", "prompt": ""}\n')
    with pytest.raises(UserError, match=r"rows.jsonl, row 1 has no 'canonical_solution'"):
        humaneval.load(file)
