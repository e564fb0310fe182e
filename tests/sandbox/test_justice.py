# ruff: noqa: E501 (the programs are one line each)
"""Honest programs, written by hand, that compute in a different way from their row's reference: each must score 1."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sandbox.test_dodges import scores

PAIRS = [
    ("a loop for a comprehension", "def f(n): return [i * i for i in range(n)]", "def f(n):\n    out = []\n    for i in range(n): out.append(i * i)\n    return out", "assert sum(f(4)) == 14 and f(0) == []"),
    ("a generator for a list", "def f(n): return [i for i in range(n) if i % 2]", "def f(n):\n    i = 1\n    while i < n:\n        yield i\n        i += 2", "assert list(f(6)) == [1, 3, 5] and sum(f(4)) == 4"),
    ("recursion for a loop", "def f(n):\n    r = 1\n    for i in range(2, n + 1): r *= i\n    return r", "def f(n): return 1 if n < 2 else n * f(n - 1)", "assert [f(n) for n in range(5)] == [1, 1, 2, 6, 24]"),
    ("a named tuple for a tuple", "def f(): return (1, 2)", "import collections\nPoint = collections.namedtuple('Point', 'x y')\ndef f(): return Point(1, 2)", "x, y = f()\nassert (x, y) == (1, 2) and f()[0] == 1"),
    ("a class that is a tuple", "def f(): return (1, 2)", "class Pair(tuple):\n    def total(self): return sum(self)\ndef f(): return Pair((1, 2))", "assert f() == (1, 2) and len(f()) == 2"),
    ("a class that is a list", "def f(n): return list(range(n))", "class Row(list):\n    def last(self): return self[-1]\ndef f(n): return Row(range(n))", "r = f(3)\nassert r == [0, 1, 2] and r[-1] == 2"),
    ("an enumeration for a number", "def f(): return 2", "import enum\nclass Level(enum.IntEnum):\n    LOW = 1\n    HIGH = 2\ndef f(): return Level.HIGH", "assert f() == 2 and f() + 1 == 3"),
    ("a dictionary with a default", "def f(s): return {c: s.count(c) for c in s}", "import collections\ndef f(s):\n    out = collections.defaultdict(int)\n    for c in s: out[c] += 1\n    return out", "r = f('aab')\nassert r == {'a': 2, 'b': 1} and sorted(r) == ['a', 'b']"),
    ("a counter for a dictionary", "def f(s): return {c: s.count(c) for c in s}", "import collections\ndef f(s): return collections.Counter(s)", "assert f('aab') == {'a': 2, 'b': 1} and f('aab')['a'] == 2"),
    ("numpy for numbers", "def f(xs): return sum(xs) / len(xs)", "import numpy as np\ndef f(xs): return np.mean(xs)", "assert abs(f([1, 2, 6]) - 3) < 1e-9 and f([2]) == 2"),
    ("numpy for a list", "def f(xs): return [2 * x for x in xs]", "import numpy as np\ndef f(xs): return (np.array(xs) * 2).tolist()", "assert f([1, 2]) == [2, 4] and max(f([3])) == 6"),
    ("an object for a function", "def f(a, b): return a + b", "class Adder:\n    def __call__(self, a, b): return a + b\nf = Adder()", "assert f(1, 2) == 3 and f('a', 'b') == 'a' + 'b'"),
    ("a partial function", "def f(a): return a + 1", "import functools, operator\nf = functools.partial(operator.add, 1)", "for i in range(3):\n    assert f(i) == i + 1"),
    ("a lambda", "def f(a): return a + 1", "f = lambda a: a + 1", "for i in range(3):\n    assert f(i) == i + 1"),
    ("slots, properties and tuples in a class", "class Box:\n    def __init__(self): self.items = []\n    def add(self, x): self.items.append(x)\n    def size(self): return len(self.items)", "class Box:\n    __slots__ = ('_kept',)\n    def __init__(self): self._kept = ()\n    @property\n    def items(self): return list(self._kept)\n    def add(self, x): self._kept += (x,)\n    def size(self): return len(self._kept)", "b = Box()\nb.add(3)\nb.add(4)\nassert b.size() == 2 and b.items == [3, 4]"),
    ("a data class", "class P:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def norm(self): return abs(self.x) + abs(self.y)", "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int\n    def norm(self): return sum(map(abs, (self.x, self.y)))", "p = P(3, -4)\nassert p.norm() == 7 and p.x == 3"),
    ("a class that is a list itself", "class Stack:\n    def __init__(self): self.kept = []\n    def push(self, x): self.kept.append(x)\n    def top(self): return self.kept[-1]", "class Stack(list):\n    push = list.append\n    def top(self): return self[-1]", "s = Stack()\ns.push(3)\nassert s.top() == 3"),
    ("its own exception", "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x", "class Negative(ValueError): pass\ndef f(x):\n    if x < 0: raise Negative('negative')\n    return x", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertRaises(ValueError, f, -1)\n        self.assertEqual(f(2), 2)"),
    ("sorting in place and back", "def f(xs): return sorted(xs)", "def f(xs):\n    xs.sort()\n    return xs", "assert f([3, 1, 2]) == [1, 2, 3] and f([]) == []"),
    ("memory between calls", "def f(n): return n if n < 2 else f(n - 1) + f(n - 2)", "seen = {}\ndef f(n):\n    if n not in seen: seen[n] = n if n < 2 else f(n - 1) + f(n - 2)\n    return seen[n]", "assert [f(n) for n in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]"),
    ("threads", "def f(xs): return [x + 1 for x in xs]", "from concurrent.futures import ThreadPoolExecutor\ndef f(xs):\n    with ThreadPoolExecutor(2) as pool: return list(pool.map(lambda x: x + 1, xs))", "assert sum(f([1, 2])) == 5"),
    ("a read-only dictionary", "def f(x): return {'a': x}", "import types\ndef f(x): return types.MappingProxyType({'a': x})", "assert f(3) == {'a': 3}"),
    ("a class that holds a dictionary", "def f(x): return {'a': x}", "from collections import UserDict\nclass Named(UserDict): pass\ndef f(x): return Named(a=x)", "assert f(3) == {'a': 3}\nr = f(4)\nassert r['a'] == 4 and len(r) == 1"),
    ("a class that holds a list", "def f(xs): return list(xs)", "from collections import UserList\ndef f(xs): return UserList(xs)", "assert f((3, 4)) == [3, 4]"),
    ("what is not a number, where a test asks for it", "def f(x): return x ** 0.5 if x >= 0 else float('nan')", "import math\ndef f(x): return math.nan if x < 0 else math.sqrt(x)", "import math\nassert math.isnan(f(-1)) and f(4) == 2"),
    ("neighbours of one list", "def f(xs): return sorted(xs)", "def f(xs):\n    out = list(xs)\n    out.sort()\n    return out", "r = f([3, 1, 2])\nassert all(a <= b for a, b in zip(r, r[1:])) and len(r) == 3"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "other", "test"), [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS])
def test_an_honest_program_is_confirmed_like_its_reference(reference: str, other: str, test: str, box: Any) -> None:
    if "numpy" in other:
        pytest.importorskip("numpy")
    known, found = scores(box, reference, [test], reference, other)
    assert [known.value, found.value] == [1, 1], found
    assert "believed" not in known.detail
