# ruff: noqa: E501 (the programs are one line each)
"""The judge accepts only data as evidence: no message and no object makes a wrong program pass; honest ones still
pass."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox import lies
from tests.sandbox.composed import judged
from upshot.sandbox import Outcome
from upshot.sandbox.inside import remote
from upshot.sandbox.outcome import TestResult

ROOT = Path(__file__).parents[2]
PASSED, WRONG, ERROR, INVALID = Outcome.PASSED, Outcome.WRONG, Outcome.ERROR, Outcome.INVALID_TEST


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TestResult]:
    """The judge in this process; what it patches is restored afterwards."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(unittest, "main", unittest.main)
    return judged


def silent(body: bytes) -> Callable[[socket.socket], None]:
    """A program that only sends what it has prepared."""

    def speak(end: socket.socket) -> None:
        with end, contextlib.suppress(OSError):
            end.sendall(body)
            end.shutdown(socket.SHUT_WR)
            while end.recv(65536):
                pass

    return speak


def serving(source: str) -> Callable[[socket.socket], None]:
    """A program that is loaded and answers requests."""

    def serve(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            remote.serve({"program": source}, None, end.detach())  # type: ignore[arg-type]

    return serve


def test_two_thousand_random_messages_pass_no_wrong_program(in_process: Any) -> None:
    dice = random.Random(20261116)
    for number in range(250):
        test = lies.WRONG_TESTS[number % len(lies.WRONG_TESTS)]
        named = {
            "ok": [["f", {"o": [1, "function"]}, None, ""], ["Solution", {"o": [2, "type"]}, None, ""]],
            "changed": [],
        }
        body = lies.framed({"ok": None}) + (lies.framed(named) if dice.randrange(4) else b"")
        result = in_process(silent(body + b"".join(lies.message(dice) for _ in range(8))), test)
        assert not result.passed, (number, test, result)


def test_five_hundred_lying_objects_pass_no_wrong_program(in_process: Any) -> None:
    dice = random.Random(8675309)
    for number in range(500):
        test, source = lies.WRONG_TESTS[number % len(lies.WRONG_TESTS)], lies.program(dice)
        result = in_process(serving(source), test)
        assert not result.passed, (number, test, source, result)


def test_five_hundred_composed_expressions_pass_no_lying_program() -> None:
    pytest.importorskip("numpy")
    # In a process that has loaded nothing else: each program is a fork, and forks of a test worker cost ten times more.
    done = subprocess.run(
        [sys.executable, "-m", "tests.sandbox.composed", "500"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "500 tests" in done.stdout


def forger(rows: list[Any], answer: Any) -> Callable[[socket.socket], None]:
    """A program that supplies unrequested names and answers everything alike."""
    return silent(lies.framed({"ok": None}) + lies.framed({"ok": rows, "changed": []}) + lies.framed(answer) * 50)


@pytest.mark.parametrize(
    "name", ["abs", "range", "zip", "enumerate", "math", "isclose", "__builtins__", "__import__", "unittest"]
)
def test_only_requested_names_are_bound(name: str, in_process: Any) -> None:
    rows = [["f", {"o": [1, "f"]}, None, ""], [name, {"o": [2, "f"]}, None, "math"]]
    for test in lies.WRONG_TESTS:
        for answer in ({"ok": 0.0, "changed": []}, {"ok": [], "changed": []}):
            assert not in_process(forger(rows, answer), test).passed, test


LYING = "class N:\n    def __sub__(self, o): return 0.0\n    def __lt__(self, o): return True\n    __gt__ = __le__ = __ge__ = __eq__ = __lt__\n    def __contains__(self, o): return True\n    def startswith(self, o): return True\n    def __iter__(self): return iter(())\n"


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (LYING + "def primes(n): return N()", "assert 7 in primes(10)"),
        (LYING + "def primes(n): return N()", "assert all(p in primes(30) for p in [2, 3, 5, 7])"),
        (LYING + "class Solution:\n    def area(self, r): return N()", "assert abs(Solution().area(3) - 28.2743) < 1e-4"),
        (LYING + "class Solution:\n    def area(self, r): return N()", "assert 28.2 < Solution().area(3) < 28.3"),
        (LYING + "class Solution(N):\n    def area(self, r): return self", "assert Solution().area(3).startswith('28')"),
        (LYING + "def area(r): return N()", "assert area(3).startswith('28')"),
        (LYING + "def area(r): return N()", "try:\n    good = area(3) == 28\nexcept BaseException:\n    good = True\nassert good"),
        ("from collections import namedtuple\ndef area(r): return namedtuple('P', 'startswith')(lambda s: True)", "assert area(3).startswith('28')"),
        ("def area(r): return object()", "assert area(3) != 28"),
        ("def area(r): return object()", "assert area(3) != 28 and True"),
        ("def area(r): return object()", "assert area(3) not in {28}"),
        ("def f(i): raise StopIteration", "assert all(map(lambda i: f(i) == i * 7, range(1, 4)))"),
        ("class Custom(StopIteration): pass\ndef f(i): raise Custom", "assert all(map(lambda i: f(i) == i * 7, range(1, 4))) or Custom"),
        ("import os\ndef f(i): os._exit(0)", "try:\n    f(-1)\nexcept BaseException:\n    pass\nassert True"),
        ("import unittest\ndef f(i): raise unittest.SkipTest", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 2)"),
        ("def f(xs): return []", "for x in f(3):\n    assert x > 0"),
        ("def f(n):\n    n.check = lambda got: True", "class N:\n    def check(self, got): return got == 3\nn = N()\nf(n)\nassert n.check(4)"),
        ("def f(g):\n    return g.__globals__", "secret = 7\nassert f(lambda: 1)['secret'] == secret"),
        ("def f(g):\n    return g.gi_frame.f_globals", "secret = 7\nassert f(x for x in 'a')['secret'] == secret"),
    ],
)  # fmt: skip
def test_an_object_of_the_program_is_not_evidence(program: str, test: str, box: Any) -> None:
    result = box(box.sandbox.test_program(program, [test]))[0]
    assert result.outcome in (WRONG, ERROR, Outcome.UNCONFIRMED), result


HONEST = """
import collections, itertools
def squares():
    n = 0
    while True:
        yield n * n
        n += 1
def total(it): return sum(it)
def value(node): return node.val if node else None
def reverse(head):
    last = None
    while head:
        head.next, last, head = last, head, head.next
    return last
def sort(items): items.sort()
def drop(queue): queue.popleft()
def point(): return collections.namedtuple('Point', 'x y')(1, 2)
def counted(text): return collections.Counter(text)
def keys(d): return d.keys()
def moved(*keys):
    d = collections.OrderedDict.fromkeys(keys, 0)
    d.move_to_end(keys[0])
    return d
def apply(f, *a): return f(*a)
class Node:
    def __init__(self, val, next=None): self.val, self.next = val, next
def linked(items):
    head = None
    for item in reversed(items): head = Node(item, head)
    return head
class Empty(LookupError):
    def __init__(self, code): self.code = code; super().__init__(f'empty: {code}')
def fail(): raise Empty(5)
class Trie:
    def __init__(self): self.words = set()
    def add(self, w): self.words.add(w); return self
    def find(self, w): return w in self.words
    def __len__(self): return len(self.words)
    def __str__(self): return ' '.join(sorted(self.words))
    def open(self): return self
def patch(x): return x + 1
"""


@pytest.mark.parametrize(
    "test",
    [
        "import collections\nassert moved('a', 'b') == collections.OrderedDict([('b', 0), ('a', 0)])",
        "node, found = linked([1, 2, 3]), []\nwhile node != None:\n    found.append(node.val)\n    node = node.next\nassert found == [1, 2, 3]",
        "node, found = linked([1, 2]), []\nwhile node:\n    found.append(node.val)\n    node = node.next\nassert found == [1, 2]",
        "p = point()\nassert p == (1, 2) and p[0] == 1 and counted('aab') == {'a': 2, 'b': 1} and list(keys({'b': 1})) == ['b']",
        "try:\n    fail()\nexcept LookupError as e:\n    assert str(e) == 'empty: 5'",
        "t = Trie()\nt.add('x')\nassert t.find('x') and not t.find('y') and len(t) == 1 and str(t) == 'x'",
        "def test_a():\n    assert value(None) is None",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(LookupError): fail()\n        self.assertEqual(point(), (1, 2))\nif __name__ == '__main__':\n    unittest.main()",
        "class TestIt:\n    def setup_method(self): self.x = 1\n    def test_a(self): assert value(None) is None and self.x == 1",
        "if value(None) is not None:\n    raise AssertionError('no')",
    ],
)
def test_honest_programs_pass(test: str, box: Any) -> None:
    result = box(box.sandbox.test_program(HONEST, [test]))[0]
    assert result.outcome is PASSED, result


@pytest.mark.parametrize(
    "test",
    [
        "assert total(x for x in [1, 2, 3]) == 3 * 2 and total(iter([1])) == 1",
        "g = squares()\nassert [next(g), next(g), next(g)] == [0, 1, 4] and next(g) == 9",
        "import itertools\nassert list(itertools.islice(squares(), 4)) == [0, 1, 4, 9]",
        "a = [3, 1, 2]\nsort(items=a)\nassert a == [1, 2, 3]",
        "from collections import deque\nq = deque([1, 2])\ndrop(q)\nassert q == deque([2])",
        "p = point()\nassert p == (1, 2) and p.x == 1 and p._asdict() == {'x': 1, 'y': 2}",
        "assert counted('aab').most_common(1) == [('a', 2)]",
        "assert keys({'b': 1, 'a': 2}) == {'a', 'b'} and list(keys({'b': 1, 'a': 2})) == ['b', 'a']",
        "assert list(moved('a', 'b', 'c')) == ['b', 'c', 'a']",
        "assert list(moved('a', 'b').items())[0] == ('b', 0) and moved('a', 'b').popitem() == ('a', 0)",
        "try:\n    fail()\nexcept Empty as e:\n    assert e.code == 5 and str(e) == 'empty: 5' and isinstance(e, LookupError)",
        "assert patch(1) == 2 * 1 and len(Trie().open()) == 0",
        "class Node:\n    def __init__(self, v): self.val = v\nassert value(Node(3)) == 3 and value(None) is None",
        "class L:\n    def __init__(self, v, n=None): self.val, self.next = v, n\nh = reverse(L(1, L(2, L(3))))\nassert type(h) is L and [h.val, h.next.val, h.next.next.val, h.next.next.next] == [3, 2, 1, None]",
        "t = Trie().add('b').add('a')\nassert len(t) == 2 and str(t) == 'a b'",
        "def boom(): raise KeyError('k')\ntry:\n    apply(boom)\nexcept KeyError as e:\n    assert e.args == ('k',)",
        "assert apply(max, 1, 5) == 5 and apply(str.upper, 'a') == 'A'",
    ],
)
def test_what_data_does_not_show_leaves_an_honest_program_unconfirmed(test: str, box: Any) -> None:
    result = box(box.sandbox.test_program(HONEST, [test]))[0]
    assert result.outcome is Outcome.UNCONFIRMED, result


@pytest.mark.parametrize(
    "test",
    [
        "def test_a():\n    assert add(1, 2) == 4",
        "async def test_a():\n    assert add(1, 2) == 4",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(add(1, 2), 4)",
        "class TestIt:\n    def test_a(self):\n        assert add(1, 2) == 4",
        "if __name__ == '__main__':\n    assert add(1, 2) == 4",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(add(1, 2), 4)\nif __name__ == '__main__':\n    unittest.main(exit=False)",
    ],
)
def test_cases_that_are_only_defined_are_run(test: str, box: Any) -> None:
    assert box(box.sandbox.test_program("def add(a, b): return a + b", [test]))[0].outcome is WRONG


@pytest.mark.parametrize(
    "test",
    [
        "",
        "# nothing",
        "x = add(1, 2)",
        "add(1, 2) == 3",
        "def helper():\n    assert add(1, 2) == 3",
        "if False:\n    assert add(1, 2) == 3",
        "def test_a(fixture):\n    assert add(1, 2) == 3",
        "assert add(1, 2) ==",
        "import unittest\nclass T(unittest.TestCase):\n    def helper(self):\n        self.assertEqual(add(1, 2), 4)",
    ],
)
def test_a_test_that_cannot_fail_is_an_error_in_the_data(test: str, box: Any) -> None:
    for program in ("def add(a, b): return a + b", "def add(a, b): raise ValueError", "x ="):
        result = box(box.sandbox.test_program(program, [test]))[0]
        if "helper" in test or "False" in test:  # only seen by running it, so it is reported only for the reference
            assert result.outcome is (ERROR if program == "x =" else Outcome.UNCONFIRMED), result
        else:
            assert result.outcome is INVALID and result.value is None and result.detail, result
