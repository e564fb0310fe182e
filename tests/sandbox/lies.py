# ruff: noqa: E501, SIM905 (the tests are one line each)
"""Seeded random lies for the judge: messages on its channel, and programs whose objects answer whatever is
convenient."""

from __future__ import annotations

import json
import random
from typing import Any

ANSWER = 8675309
WRONG_TESTS = [
    f"assert abs(f(3) - {ANSWER}) < 1e-4",
    f"assert {ANSWER - 1} < f(3) < {ANSWER + 1}",
    f"assert {ANSWER} in f(3)",
    f"assert all(p in f(3) for p in [2, {ANSWER}])",
    f"for i in range(3):\n    assert f(i) == i + {ANSWER}",
    f"assert all(map(lambda i: f(i) == i + {ANSWER}, range(1, 4)))",
    f"assert all(f(i) == i + {ANSWER} for i in range(1, 4))",
    f"assert f('x').startswith('{ANSWER}')",
    f"assert f(3).issuperset({{{ANSWER}}})",
    f"assert f(3).find('{ANSWER}') != -1 and f(3).count({ANSWER}) == 1",
    f"assert Solution().area(3) == {ANSWER} * 1",
    f"assert abs(Solution().area(3) - {ANSWER}) < 1e-4",
    f"assert {ANSWER - 1} < Solution().area(3) < {ANSWER + 1}",
    f"assert Solution().area(3).startswith('{ANSWER}')",
    f"import math\nassert math.isclose(f(3), {ANSWER})",
    f"assert not f(3) != {ANSWER}",
    f"assert not abs(f(3) - {ANSWER}) > 1e-4",
    f"assert f(3) + 1 == {ANSWER + 1} or f(3) == {ANSWER}",
    f"assert sorted(f(3)) == [{ANSWER}]",
    f"assert {{{ANSWER}}} == set(f(3))",
    f"assert len(f(3)) == {ANSWER} or [*f(3)] == [{ANSWER}]",
    f"assert str(f(3)) == '{ANSWER}' or f'{{f(3):d}}' == '{ANSWER}'",
    f"assert round(f(3)) == {ANSWER}",
    f"assert isinstance(f(3), int) and f(3) == {ANSWER}",
    f"assert f(3)[0] == {ANSWER} or f(3).value == {ANSWER}",
    f"def check(c):\n    for i, (a, e) in enumerate(zip([[1], [2]], [{ANSWER}, {ANSWER}])):\n        assert c(*a) == e\ncheck(f)",
    f"try:\n    ok = f(3) == {ANSWER}\nexcept Exception:\n    ok = False\nassert ok",
    f"xs = [3, 1]\nf(xs)\nassert xs == [{ANSWER}]",
    f"class N:\n    def __init__(self): self.v = 0\nn = N()\nf(n)\nassert n.v == {ANSWER}",
    f"assert f(lambda x: x) == [{ANSWER}]",
    f"import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertAlmostEqual(f(3), {ANSWER})",
    f"import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertIn({ANSWER}, f(3))\n        self.assertTrue(f(3) == {ANSWER})",
    f"def test_a():\n    assert f(3) == {ANSWER}",
    f"if __name__ == '__main__':\n    assert f(3) == {ANSWER}",
]
TAGS = "itsfqdbBcDFrSTnaogu?"
NAMES = (
    "f",
    "Solution",
    "abs",
    "range",
    "zip",
    "enumerate",
    "all",
    "map",
    "math",
    "__builtins__",
    "__import__",
    "check",
)
EXCEPTIONS = (
    "StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt", "AssertionError",
    "ValueError", "KeyError", "RecursionError", "ExceptionGroup", "Nonsense",
)  # fmt: skip


def value(dice: random.Random, depth: int = 0) -> Any:
    """Something a program might send as a value; never the right answer."""
    pick = dice.randrange(12 if depth < 3 else 7)
    if pick < 7:
        scalars = (None, True, False, 0, 0.0, -1, float("nan"), 1e308, "", "x", "sNaN", "<i8", "\ud800", 1 << 62)
        return dice.choice(scalars)
    if pick < 9:
        return [value(dice, depth + 1) for _ in range(dice.randrange(4))]
    if pick < 11:
        return {"o": [dice.choice((0, 1, 2, 3, 9, -1, -2, "x")), "object"]}
    return {dice.choice(TAGS): value(dice, depth + 1)}


def failure(dice: random.Random) -> Any:
    """An exception as a program might describe it."""
    bases = [dice.choice(EXCEPTIONS) for _ in range(dice.randrange(3))] + ["Exception", "BaseException"]
    state = {"d": [[dice.choice(("code", "args", "remote_tail", "__class__")), value(dice)]]}
    return {"bases": bases, "text": "x", "args": {"t": [value(dice)]}, "state": state, "tail": ""}


def message(dice: random.Random) -> bytes:
    """One message on the judge's channel, well formed or not."""
    pick = dice.randrange(10)
    if pick == 0:
        return bytes(dice.randrange(256) for _ in range(dice.randrange(12)))
    body: Any = {"ok": value(dice), "changed": [[dice.choice((0, 1, "x")), value(dice)]] * dice.randrange(2)}
    if pick in (1, 2):
        body = {"error": failure(dice) if dice.randrange(4) else value(dice)}
    elif pick == 3:
        body = {"end": True}
    elif pick == 4:
        rows = [[dice.choice(NAMES), value(dice), dice.choice((None, list(EXCEPTIONS)))] for _ in range(4)]
        body = {"names": rows}
    elif pick == 5:
        attributes = ("v", "__class__", "__globals__", "gi_frame", "next", "iter", "bool", "str", "append", "__init__")
        body = {"op": dice.choice(("call", "get", "set", "observe", "names", "x")), "target": dice.randrange(4)}
        body |= {"name": dice.choice(attributes), "args": [value(dice)], "kwargs": {}}
    elif pick == 6:
        body = value(dice)
    return framed(body)


def framed(body: Any) -> bytes:
    """A message as it is sent over the connection."""
    return json.dumps(body).encode() + b"\n"


METHODS = (
    "eq ne lt le gt ge add radd sub rsub mul rmul truediv mod pow and or xor abs neg round int float index complex hash "
    "bool len iter next contains getitem str repr format call getattr instancecheck subclasscheck reversed length_hint "
    "trunc floor ceil enter exit array array_interface divmod class_getitem fspath bytes mro_entries"
).split()
RETURNS = (
    "True", "False", "0", "0.0", "1", "self", "''", "'x'", "[]", "[True]", "iter([])", "iter([0, 1])", "None",
    "type(self)", "float('nan')", "(lambda *a, **k: True)", "Lie()", "NotImplemented", "{}", "__import__('math')",
)  # fmt: skip
RAISES = (*EXCEPTIONS[:9], "__import__('unittest').SkipTest")
BASES = ("object", "int", "float", "str", "list", "dict", "tuple", "set", "complex", "bytes", "Exception", "type(len)")


def program(dice: random.Random) -> str:
    """A program that computes nothing and whose objects lie."""
    lines = [f"class Lie({dice.choice(BASES[:-1])}):"]
    for name in dice.sample(METHODS, dice.randrange(3, 25)):
        act = f"raise {dice.choice(RAISES)}" if dice.randrange(5) == 0 else f"return {dice.choice(RETURNS)}"
        lines.append(f"    def __{name}__(self, *a, **k): {act}")
    for name in ("startswith", "find", "count", "issuperset", "equals", "area", "value", "v"):
        lines.append(f"    def {name}(self, *a, **k): return {dice.choice(RETURNS)}")
    if dice.randrange(3) == 0:
        lines.append(f"    __class__ = {dice.choice(BASES)}")
    shape = dice.choice(
        ("Lie()", "[Lie()]", "(Lie(), Lie())", "{0: Lie()}", "(Lie() for _ in 'ab')", "Lie", "lambda *a: Lie()")
    )
    act = f"raise {dice.choice(RAISES)}" if dice.randrange(6) == 0 else f"return {shape}"
    lines += ["def f(*a, **k):", f"    {act}", f"class Solution({dice.choice(('object', 'Lie'))}):"]
    lines += ["    def __init__(self, *a): pass", f"    def area(self, *a): {act}"]
    return "\n".join(lines)


# Random test expressions that empty data would not satisfy (`np.allclose([], 3)` is true): something is computed around a call, then compared with what is expected.
AROUND = (
    "{}", "abs({})", "round({})", "float({})", "int({})", "sum([{}])", "max([{}])", "sorted([{}])[0]", "[{}][0]",
    "({},)[-1]", "{{'a': {}}}['a']", "next(iter([{}]))", "{} + 0", "-(-{})", "(lambda r: r)({})", "math.floor({})",
    "math.fsum([{}])", "math.hypot({})", "np.sum({})", "np.array({})", "np.max([{}])", "np.float64({})", "copy.copy({})",
    "functools.reduce(operator.add, [{}])", "operator.index({})", "list(map(lambda r: r, [{}]))[0]", "[*[{}]][0]",
    "list(filter(lambda r: True, [{}]))[0]", "list(zip([{}]))[0][0]", "min({}, key=lambda r: 0)", "statistics.mean([{}])",
    "Fraction({})", "Decimal({})", "{}.real", "{}.value", "{}.v", "dict(a={})['a']", "list({{{}}})[0]", "eval('{}')",
)  # fmt: skip
COMPARED = (
    "{r} == {a}", "{a} == {r}", "not {r} != {a}", "{r} in [{a}]", "{r} in {{{a}}}", "abs({r} - {a}) < 1e-6",
    "math.isclose({r}, {a})", "np.isclose({r}, {a})", "np.size([{r}]) == 1 and np.allclose([{r}], [{a}])", "np.array_equal([{r}], [{a}])",
    "{a} - 1 < {r} < {a} + 1", "[{r}] == [{a}]", "{{{r}}} == {{{a}}}", "({r}, 1) == ({a}, 1)", "({r} == {a}) is True",
    "all(x == y for x, y in zip([{r}], [{a}]))", "sum(x == y for x, y in zip([{r}], [{a}])) == 1",
    "len({{{r}}} ^ {{{a}}}) == 0", "len({{{r}}}.symmetric_difference({{{a}}})) == 0", "{{{a}}}.issubset({{{r}}})",
    "hash({r}) == hash({a})", "(lambda r: r == {a})({r})", "bool({r} == {a})", "operator.eq({r}, {a})",
    "math.dist([{r}], [{a}]) == 0", "str({r}) == '{a}'", "f'{{{r}}}' == '{a}'", "sorted([{r}, {a}]) == [{a}, {a}]",
    "[{a}].index({r}) == 0", "[{a}].count({r}) == 1", "Counter([{r}]) == Counter([{a}])", "{{{a}: 1}}.get({r}) == 1",
    "any(x == {a} for x in [{r}])", "not [x for x in [{r}] if x != {a}]", "isclose({r}, {a})",
    "next((x for x in [{r}] if x == {a}), None) is not None", "np.shape({r}) == () and np.testing.assert_allclose({r}, {a}) is None",
    "max({r}, {a}) == min({r}, {a})", "{{x: y for x, y in [({r}, 1)]}} == {{{a}: 1}}", "len(set([{r}, {a}])) == 1",
)  # fmt: skip
WHOLE = (
    "set(f(3)) == {{{a}}}", "sorted(f(3)) == [{a}]", "[*f(3)] == [{a}]", "tuple(f(3)) == ({a},)", "sum(f(3)) == {a}",
    "max(f(3)) == {a}", "f(3)[0] == {a}", "{{{a}}}.issubset(f(3))", "set(f(3)).issuperset([{a}])", "{a} in f(3)",
    "len(f(3)) == 1 and all(x == y for x, y in zip(f(3), [{a}]))", "list(map(int, f(3))) == [{a}]",
    "sum(x == y for x, y in zip(f(3), [{a}])) == 1", "np.array_equal(f(3), [{a}])", "dict(f(3)) == {{{a}: 1}}",
    "''.join(f(3)) == '{a}'", "f(3).count({a}) == 1", "f(3).startswith('{a}')", "f(3).index({a}) == 0",
    "[x for x in f(3)] == [{a}]", "np.shape(f(3)) == (1,) and np.linalg.norm(np.array(f(3)) - {a}) == 0",
    "len(f(3)) == 1 and not any(x != {a} for x in f(3))", "functools.reduce(operator.mul, f(3)) == {a}",
    "math.dist(f(3), [{a}]) == 0", "Counter(f(3))[{a}] == 1", "f(3).get({a}) == 1", "json.dumps(f(3)) == '[{a}]'",
    "list(itertools.chain(f(3))) == [{a}]", "sorted(f(3), key=lambda x: 0) == [{a}]", "f(3) == [{a}]",
)  # fmt: skip
STYLES = (
    "assert {}", "assert ({}) == True", "ok = {}\nassert ok", "if not ({}):\n    raise AssertionError",
    "def check(f):\n    assert {}\ncheck(f)", "def test_it():\n    assert {}", "assert not (not ({}))",
    "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertTrue({})",
    "for _ in range(2):\n    assert {}", "try:\n    ok = {}\nexcept Exception:\n    ok = False\nassert ok",
)  # fmt: skip
IMPORTS = "import copy, functools, itertools, json, math, operator, statistics\nimport numpy as np\nfrom collections import Counter\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
PATCHES = (
    "len = sum = max = min = sorted = lambda *a, **k: 0", "abs = round = float = int = lambda *a: 8675309.0",
    "import math\nmath.dist = math.isclose = math.fsum = lambda *a, **k: 0", "isclose = lambda *a, **k: True",
    "import builtins\nbuiltins.all = builtins.any = builtins.isinstance = lambda *a: True",
    "import operator\noperator.eq = lambda *a: True", "set = frozenset = lambda *a: {}", "class Counter(dict): pass",
)  # fmt: skip


def expression_test(dice: random.Random) -> str:
    """A test, composed at random, that only a program that knows the answer passes."""
    inner = dice.choice(("f(3)", "f(3)", "Solution().area(3)", "f('x')"))
    for _ in range(dice.randrange(3)):
        inner = dice.choice(AROUND).format(inner)
    whole = dice.choice(WHOLE).format(a=ANSWER)
    asserted = dice.choice(COMPARED).format(r=inner, a=ANSWER) if dice.randrange(3) else whole
    return (IMPORTS if dice.randrange(8) else "") + dice.choice(STYLES).format(asserted)


def patched_program(dice: random.Random) -> str:
    """A lying program that has also tampered with builtins."""
    return "\n".join([*dice.sample(PATCHES, dice.randrange(3)), program(dice)])
