# ruff: noqa: E501 (the programs are one line each)
"""Objects that give one line of a test one answer and the next line another; honest ones must not suffer for it."""

from __future__ import annotations

from typing import Any

import pytest

from upshot.sandbox import Limits, Outcome
from upshot.sandbox.asserts.verdict import Remains, of_calls, of_judged, of_plain
from upshot.sandbox.outcome import TestResult

EMPTY = "class A:\n    def __len__(self): return 3\n    def __iter__(self): return iter(())\ndef f(*a): return A()"
SHRINKS = "class A:\n    n = 0\n    def __len__(self):\n        A.n += 1\n        return 3 if A.n == 1 else 0\n    def __getitem__(self, i): return 99\ndef f(*a): return A()"
CHANGES = "class A:\n    n = 0\n    def __iter__(self):\n        A.n += 1\n        return iter(range(100)) if A.n == 1 else iter(())\ndef f(*a): return A()"
SWALLOWS = "def each(xs, g):\n    try: g(99)\n    except BaseException: pass"
SUPPRESSES = (
    "class R:\n    def __enter__(self): return self\n    def __exit__(self, *a): return True\ndef f(x): return 0"
)


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (EMPTY, "r = f(5)\nassert len(r) == 3\nassert all(a == b for a, b in zip(r, [1, 2, 3]))"),
        (EMPTY, "r = f(5)\nassert all(a == b for a, b in zip(r, [1, 2, 3]))\nassert len(r) == 3"),
        (EMPTY, "r = f(5)\nassert len(r) == 3\nfor x in r:\n    assert x == 1"),
        (EMPTY, "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        r = f(5)\n        self.assertEqual(len(r), 3)\n        for a, b in zip(r, [1, 2, 3]):\n            self.assertEqual(a, b)"),
        (SHRINKS, "r = f(5)\nassert len(r) == 3\nfor i in range(len(r)):\n    assert r[i] == [1, 2, 3][i]"),
        (CHANGES, "r = f(10)\nassert 7 in r\nassert 4 not in r"),
        (CHANGES, "r = f(10)\nassert {2, 3, 5, 7} <= set(r)\nassert not any(x in r for x in (1, 4, 6, 8, 9))"),
    ],
)  # fmt: skip
def test_an_object_has_the_same_content_every_time_it_is_read(program: str, test: str, box: Any) -> None:
    assert box(box.sandbox.test_program(program, [test]))[0].outcome is Outcome.UNCONFIRMED


def test_an_assert_that_fails_in_a_callback_fails_even_if_it_is_caught(box: Any) -> None:
    test = "def on(x):\n    assert x in (1, 2, 3)\neach([1, 2, 3], on)"
    assert box(box.sandbox.test_program(SWALLOWS, [test]))[0].outcome is Outcome.UNCONFIRMED
    honest = "def each(xs, g):\n    for x in xs: g(x)"
    assert box(box.sandbox.test_program(honest, [test]))[0].outcome is Outcome.UNCONFIRMED


def test_a_context_manager_of_the_program_swallows_no_failed_assert(box: Any) -> None:
    """It is not judged a liar either: what a program's own context manager does with an exception is its own
    business."""
    [result] = box(box.sandbox.test_program(SUPPRESSES, ["with R():\n    assert f(1) == 7 * 1"]))
    assert result.outcome is Outcome.UNCONFIRMED


@pytest.mark.parametrize(
    "test", ["r = f(3)\nif isinstance(r, list):\n    assert r == [1]", "for x in f(3).args[1:]:\n    assert x == 1"]
)
def test_an_exception_class_in_place_of_a_function_neither_passes_nor_makes_the_test_invalid(
    test: str, box: Any
) -> None:
    result = box(box.sandbox.test_program("class f(Exception): pass", [test]))[0]
    assert not result.passed and result.outcome is not Outcome.INVALID_TEST, result


HONEST = """
import asyncio, collections
class Door:
    def __init__(self): self.opened = False
    def open(self): self.opened = True
class Managed:
    def __enter__(self): self.inside = True; return self
    def __exit__(self, *a): self.inside = False
class Bag:
    def __init__(self): self.items = []
    def add(self, x): self.items.append(x); return self
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
Pair = collections.namedtuple('Pair', 'x y')
Odd = collections.namedtuple('Odd', ['class', 'x'], rename=True)
def pair(): return Pair(1, 2)
def odd(): return Odd(1, 2)
def kind(x): return type(x)
def count(n): yield from range(n)
def fails_late():
    yield 1
    yield 2
    raise ValueError('late')
async def later(x): return x + 1
def larger(a, b): return a if a > b else b
def hidden(n): return n._v
def append(n, x): n.items.append(x); n.items.append(x); return len(n.items)
class Count:
    def __init__(self): self.n = 0
    def up(self): self.n += 1
"""
TABLES = """
import pandas as pd
def table(): return pd.DataFrame({'a': [1, 2], 'b': ['x', None], 't': pd.to_datetime(['2024-01-01', None])})
def total(frame): return int(frame['a'].sum())
def mean(series): return float(series.mean())
"""
LIE = "class N:\n    _typ = 'dataframe'\n    def __getattr__(self, name): return N()\n    def __call__(self, *a, **k): return True\n    def __len__(self): return 1\ndef table(): return N()"


@pytest.mark.parametrize(
    "test",
    [
        "d = Door()\nd.open()\nassert d.opened",
        "assert odd() == (1, 2) and sum(count(2000)) == 2000 * 1999 // 2",
    ],
)  # fmt: skip
def test_honest_habits_pass(test: str, box: Any) -> None:
    result = box(box.sandbox.test_program(HONEST, [test], Limits(cpu_seconds=4)))[0]
    assert result.outcome is Outcome.PASSED, result


def test_a_type_does_not_count_as_data(box: Any) -> None:
    program = "KEPT = [1]\ndef f(x): return KEPT if x else type(x)"
    tests = ["def test_a():\n    list = f(1)\n    assert f(1) is list", "assert f(0) is int", "assert f(0) is str"]
    found = [result.outcome for result in box(box.sandbox.test_program(program, tests))]
    assert found == [Outcome.UNCONFIRMED, Outcome.UNCONFIRMED, Outcome.WRONG]


@pytest.mark.parametrize(
    "test",
    [
        "with Managed() as m:\n    assert m.inside\nassert not m.inside",
        "b = Bag().add(1)\nassert len(b) == 1 and list(b) == [1]\nb.add(2)\nassert len(b) == 2 and list(b) == [1, 2] and 2 in b",
        "p = pair()\nassert isinstance(p, Pair) and p.x + p.y == 3",
        "assert kind(3) is int and kind([]) is list and True",
        "assert sum(count(20000)) == 20000 * 19999 // 2",
        "g, got = fails_late(), []\ntry:\n    for x in g: got.append(x)\nexcept ValueError as e:\n    assert str(e) == 'late'\nassert got == [1, 2]",
        "import asyncio\nr = asyncio.run(later(1))\nassert r == 2",
        "async def test_it():\n    assert await later(1) == 2",
        "import functools\n@functools.total_ordering\nclass C:\n    def __init__(self, v): self.v = v\n    def __lt__(self, o): return self.v < o.v\n    def __eq__(self, o): return self.v == o.v\nassert larger(C(1), C(2)).v == 2",
        "class N:\n    def __init__(self): self._v = 3\nassert hidden(N()) == 3 * 1",
        "class N:\n    def __init__(self): self.items = []\nn = N()\nassert append(n, 3) == 2 and n.items == [3, 3]",
    ],
)  # fmt: skip
def test_properties_that_data_cannot_show_are_unconfirmed(test: str, box: Any) -> None:
    result = box(box.sandbox.test_program(HONEST, [test], Limits(cpu_seconds=4)))[0]
    assert result.outcome is Outcome.UNCONFIRMED, result


def test_a_test_with_threads_is_never_wrong(box: Any) -> None:
    """Whether the judge confirms it depends on whether the threads' calls happen to interleave."""
    test = (
        "import threading\nc = Count()\n"
        "ts = [threading.Thread(target=lambda: [c.up() for _ in range(50)]) for _ in range(4)]\n"
        "[t.start() for t in ts]\n[t.join() for t in ts]\nassert c.n == 200"
    )
    result = box(box.sandbox.test_program(HONEST, [test], Limits(cpu_seconds=4)))[0]
    assert result.outcome in (Outcome.PASSED, Outcome.UNCONFIRMED), result


@pytest.mark.parametrize(
    "test",
    [
        "import pandas as pd\nexpected = pd.DataFrame({'a': [1, 2], 'b': ['x', None], 't': pd.to_datetime(['2024-01-01', None])})\npd.testing.assert_frame_equal(table(), expected)",
        "import pandas as pd\nd = table()\nassert isinstance(d, pd.DataFrame) and d.shape == (2, 3) and d['a'].sum() == 3 and d.isna().sum().sum() == 2",
        "import pandas as pd\npd.testing.assert_series_equal(table()['a'], pd.Series([1, 2], name='a'))",
    ],
)  # fmt: skip
def test_tables_are_unconfirmed(test: str, box: Any) -> None:
    limits = Limits(cpu_seconds=6, memory_mb=1024)
    result = box(box.sandbox.test_program(TABLES, [test], limits))[0]
    assert result.outcome is Outcome.UNCONFIRMED, result
    assert not box(box.sandbox.test_program(LIE, [test], limits))[0].passed


@pytest.mark.parametrize(
    "test",
    [
        "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    f()\nassert b.getvalue() == 'hi'",
        "import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\nf()\ngot, sys.stdout = sys.stdout.getvalue(), old\nassert got == 'hi'",
    ],
)
def test_a_test_that_captures_output_is_not_judged(test: str, box: Any) -> None:
    assert box(box.sandbox.test_program("def f(): print('hi', end='')", [test]))[0].outcome is Outcome.UNCONFIRMED
    assert box(box.sandbox.test_program("def f(): print('ho', end='')", [test]))[0].outcome is Outcome.WRONG


def test_a_result_line_beyond_its_limit_does_not_crash_the_judge() -> None:
    assert of_plain(1, Remains(lines=[{"big": 3}]))[0].outcome is Outcome.ERROR
    assert of_judged([TestResult(Outcome.PASSED)], Remains(lines=[{"big": 3}]))[0].outcome is Outcome.UNCONFIRMED


def test_times_and_tracebacks_a_program_reports_are_bounded() -> None:
    from upshot.sandbox.asserts.values import split

    checks = [split("assert f() == 1") or []]
    (timed,) = of_calls(checks, Remains(wall=1.0, lines=[{"v": [1], "t": float("nan")}]))
    (failed,) = of_calls(checks, Remains(wall=1.0, lines=[{"e": ["X", "y" * 10**6], "t": 0}]))
    assert timed is not None and timed.seconds == 0.0 and failed is not None and len(failed.detail) <= 2000
