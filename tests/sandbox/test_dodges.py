# ruff: noqa: E501 (the programs are one line each)
"""Programs that fail and try to earn more than a failure, and honest programs that once got less than they should."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
from typing import Any

import pytest

from tests.patience import patience
from tests.sandbox.conftest import soon
from upshot.core.score import Reason, Score
from upshot.sandbox import Limits, Outcome
from upshot.tasks.verifiers.base import verifiers

PLAIN = "import sys, os\nJUDGED = 'try_tests' not in {sys._getframe(i).f_code.co_name for i in range(1, 6)}\n"
LIE = "class Lie:\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\n    __rsub__ = __sub__\n    def __lt__(self, o): return True\n    __gt__ = __le__ = __lt__\n    def __abs__(self): return 0\n"


def scores(box: Any, reference: str, tests: list[str], *programs: str) -> list[Score]:
    """The scores of programs on a row with this reference."""

    async def run() -> list[Score]:
        verifier = verifiers.create("code", {"cpu_seconds": 3.0}, sandbox=box.sandbox)
        row = {"code": reference, "test_list": tests}
        return [await verifier.verify(f"```python\n{program}\n```", None, row) for program in programs]

    return box(run())


AREA, AREA_TEST = "def area(r): return 3.14159265 * r * r", "assert abs(area(3) - 28.27433385) < 1e-4"
DODGES = {
    "equal to everything": LIE + "def area(r): return Lie()",
    "raises before the judge": PLAIN + LIE + "def area(r):\n    if JUDGED: raise ValueError\n    return Lie()",
    "leaves the judge": PLAIN + LIE + "def area(r):\n    if JUDGED: os._exit(0)\n    return Lie()",
    "hangs before the judge": PLAIN + LIE + "def area(r):\n    while JUDGED: pass\n    return Lie()",
    "takes all memory before the judge": PLAIN + LIE + "def area(r):\n    if JUDGED: return bytearray(1 << 40)\n    return Lie()",
    "does not load before the judge": PLAIN + LIE + "if JUDGED: raise SystemExit\ndef area(r): return Lie()",
    "kills itself before the judge": PLAIN + LIE + "import signal\ndef area(r):\n    if JUDGED: os.kill(os.getpid(), signal.SIGKILL); os.abort()\n    return Lie()",
    "cannot be carried": PLAIN + LIE + "def area(r):\n    x = []\n    for _ in range(999): x = [x]\n    return x if JUDGED else Lie()",
    "skips": "import unittest\ndef area(r): raise unittest.SkipTest('not today')",
    "patches abs": "import builtins\nbuiltins.abs = lambda x: 0\ndef area(r): return 0",
    "is silent": PLAIN + "if not JUDGED:\n    os.write(4, b'{\"p\":true,\"t\":0}\\n' * 9); os._exit(0)\ndef area(r): return 0",
}  # fmt: skip


@pytest.mark.parametrize("name", DODGES)
def test_a_dodge_earns_what_an_honest_failure_earns(name: str, box: Any) -> None:
    reference, honest, dodge = scores(box, AREA, [AREA_TEST], AREA, "def area(r): return 0", DODGES[name])
    assert [reference.value, honest.value, dodge.value] == [1, 0, 0], dodge


def test_no_program_can_make_a_row_look_untestable(box: Any) -> None:
    test = "if 'area' in globals():\n    assert abs(area(3) - 28.27433385) < 1e-4"
    reference, dodge = scores(box, AREA, [test], AREA, "def other(r): return 0")
    assert [reference.value, dodge.value] == [1, 0], dodge
    (nothing,) = scores(box, AREA, ["if False:\n    assert area(3) == 0"], AREA)
    assert nothing.value is None and nothing.reason == Reason.BAD_ROW, nothing


@pytest.mark.parametrize(
    "limit", ["resource.setrlimit(resource.RLIMIT_CPU, (1, 1))", "resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))"]
)
def test_no_program_can_fake_being_killed_by_the_host(limit: str, box: Any) -> None:
    program = f"import resource\ndef f():\n    {limit}\n    while True: pass\ndef g(): return resource.getrlimit(resource.RLIMIT_CPU)[0] > 0"
    found = [result.outcome for result in box(box.sandbox.test_program(program, ["assert f() == 1", "assert g()"]))]
    assert found == [Outcome.ERROR, Outcome.PASSED]


UNITTEST = (
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(area(2), 12.5663706)"
)


def test_a_skipped_case_does_not_pass(box: Any) -> None:
    for skipping in ("import unittest\ndef area(r): raise unittest.SkipTest", "import unittest\nunittest.TestCase.setUp = lambda self: self.skipTest('no')\ndef area(r): return 0"):  # fmt: skip
        (result,) = box(box.sandbox.test_program(skipping, [UNITTEST]))
        assert result.value == 0, result


EMPTIED = [
    ("def f(xs): return sorted(xs)", "xs = [3, 1, 2]\nassert f(xs) == sorted(xs)", "def f(xs): xs.clear(); return []"),
    ("def f(xs): return sorted(xs)", "xs = [3, 1, 2]\nr = f(xs)\nassert r == sorted(xs)", "def f(xs): del xs[:]; return xs"),
    ("def f(xs): return len(xs)", "xs = [3, 1]\nassert f(xs) == len(xs)", "def f(xs): xs.clear(); return 0"),
    ("def f(xs): return sum(xs)", "xs = [3, 1]\nassert f(xs) == sum(xs)", "def f(xs): xs[:] = []; return 0"),
    ("def f(xs): return xs[::-1]", "xs = [3, 1]\nassert f(xs) == xs[::-1]", "def f(xs): xs.clear(); return []"),
    ("def f(xs): return [x for x in xs]", "xs = [3, 1]\nassert f(xs) == xs", "def f(xs): xs.clear(); return []"),
    ("def f(d): return sorted(d)", "d = {'a': 1}\nassert f(d) == sorted(d)", "def f(d): d.clear(); return []"),
    ("def f(d): return dict(d)", "d = {'a': 1}\nassert f(d) == d", "def f(d): d.clear(); return {}"),
    ("def f(s): return sorted(s)", "s = {2, 1}\nassert f(s) == sorted(s)", "def f(s): s.clear(); return []"),
    ("def f(s): return set(s)", "s = {2, 1}\nassert f(s) == s", "def f(s): s.clear(); return set()"),
    ("def f(q): return list(q)", "from collections import deque\nq = deque([2, 1])\nassert f(q) == list(q)", "def f(q): q.clear(); return []"),
    ("def f(m): return [list(r) for r in zip(*m)]", "m = [[1, 2], [3, 4]]\nassert f(m) == [list(r) for r in zip(*m)]", "def f(m): m.clear(); return []"),
    ("def f(xs): return max(xs)", "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        xs = [3, 1]\n        self.assertEqual(f(xs), max(xs))", "def f(xs): xs[:] = [0]; return 0"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "test", "liar"), EMPTIED)
def test_a_program_that_empties_its_arguments_is_judged_by_the_original_ones(
    reference: str, test: str, liar: str, box: Any
) -> None:
    assert [score.value for score in scores(box, reference, [test], reference, liar)] == [1, 0]


def test_a_reference_may_change_its_arguments(box: Any) -> None:
    test = "xs = [3, 1, 2]\nf(xs)\nassert xs == [1, 2, 3]"
    other = "def f(xs):\n    kept = sorted(xs)\n    xs.clear()\n    xs.extend(kept)"
    found = scores(box, "def f(xs): xs.sort()", [test], "def f(xs): xs.sort()", other, "def f(xs): xs.clear()")
    assert [score.value for score in found] == [1, 1, 0] and found[0].detail["believed"] == 1


NUMBERS = "import numpy as np\ndef f(n): return np.arange(n) * 2.0\n"
EMPTY = [
    "def f(n): return range(0)",
    "def f(n): return bytearray()",
    "def f(n): return []",
    "import numpy as np\ndef f(n): return np.zeros((0,))",
    "import numpy as np\ndef f(n): return np.zeros((0, 3))",
]


@pytest.mark.parametrize("program", EMPTY)
def test_empty_data_is_not_close_to_anything(program: str, box: Any) -> None:
    pytest.importorskip("numpy")
    test = "import numpy as np\nassert np.all(np.isclose(f(1), [0.5]))"
    reference = "import numpy as np\ndef f(n): return np.array([0.5])"
    alias = ["from numpy import allclose as near\nassert near(f(1), 0.5)", "assert near(f(1), [0.5])"]
    assert [score.value for score in scores(box, reference, [test], reference, program)] == [1, 0]
    assert [score.value for score in scores(box, reference, alias, reference, program)] == [1, 0]


def test_an_argument_emptied_in_place_is_not_close_to_anything(box: Any) -> None:
    pytest.importorskip("numpy")
    test = "import numpy as np\nxs = [1.0, 2.0]\nf(xs)\nassert np.allclose(xs, [2.0, 4.0])"
    reference = "def f(xs): xs[:] = [2 * x for x in xs]"
    assert [score.value for score in scores(box, reference, [test], reference, "def f(xs): xs.clear()")] == [1, 0]


VAGUE = {
    "not a number": ("def f(x): return x / 2", "assert not abs(f(3) - 1.5) > 1e-6", "def f(x): return float('nan')"),
    "not a number, where a word of the test has these letters": ("def f(x): return x / 2", "finance = f(3)\nassert not abs(finance - 1.5) > 1e-6", "def f(x): return float('nan')"),
    "not a number, and a test that raises": ("def f(x): return x / 2", "if abs(f(3) - 1.5) > 1e-6:\n    raise AssertionError", "def f(x): return float('nan')"),
    "nothing beside something": ("def f(xs): return [2 * x for x in xs]", "assert all(a == b for a, b in zip(f([1, 2]), [2, 4]))", "def f(xs): return []"),
    "less beside more": ("def f(xs): return [2 * x for x in xs]", "xs = [1, 2]\nassert all(b == 2 * a for a, b in zip(xs, f(xs)))", "def f(xs): return [2]"),
}  # fmt: skip


@pytest.mark.parametrize("name", VAGUE)
def test_a_value_that_leaves_a_comparison_out_is_not_right(name: str, box: Any) -> None:
    reference, test, program = VAGUE[name]
    known, dodge = scores(box, reference, [test], reference, program)
    assert [known.value, dodge.value] == [1, 0] and "believed" not in known.detail, dodge


RUN = [
    "assert eval(f(3)) == 6",
    "names = {}\nexec('r = ' + f(3), names)\nassert names['r'] == 6",
    "import pickle\nassert pickle.loads(f(3)) == 6",
]


@pytest.mark.parametrize("test", RUN)
def test_a_judge_that_would_run_what_the_program_gave_confirms_nothing(test: str, box: Any) -> None:
    lie = "type('E', (), {'__eq__': lambda self, other: True})()"
    program = f'def f(x): return "{lie}"'
    if "pickle" in test:
        program = f'import pickle\nclass P:\n    def __reduce__(self): return eval, ("{lie}",)\ndef f(x): return pickle.dumps(P())'
    (result,) = box(box.sandbox.test_program(program, [test]))
    assert result.outcome is Outcome.UNCONFIRMED, result


STACK = "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x); return len(self.items)\ndef add(a, b): return a + b\ndef fail(): raise ValueError('no')\n"
PYTEST = {
    "parameters of a method": "import pytest\nclass TestIt:\n    @pytest.mark.parametrize('a, b, c', [(1, 2, 3), (2, 2, 4)])\n    def test_a(self, a, b, c): assert add(a, b) == c",
    "setup_method": "class TestIt:\n    def setup_method(self, method): self.s = Stack()\n    def test_a(self): assert self.s.push(1) == 1",
    "setup_class": "class TestIt:\n    @classmethod\n    def setup_class(cls): cls.s = Stack()\n    def test_a(self): assert self.s.push(1) == 1",
    "a fixture in a class": "import pytest\nclass TestIt:\n    @pytest.fixture\n    def s(self): return Stack()\n    def test_a(self, s): assert s.push(1) == 1",
    "an autouse fixture": "import pytest\nclass TestIt:\n    @pytest.fixture(autouse=True)\n    def make(self): self.s = Stack()\n    def test_a(self): assert self.s.push(1) == 1",
    "parameters of a function": "import pytest\n@pytest.mark.parametrize('a, b', [(1, 2), (2, 3)])\ndef test_a(a, b): assert add(a, 1) == b",
    "a fixture": "import pytest\n@pytest.fixture\ndef s(): return Stack()\ndef test_a(s): assert s.push(1) == 1",
    "raises": "import pytest\ndef test_a():\n    with pytest.raises(ValueError):\n        fail()",
    "raises in a class": "import pytest\nclass TestIt:\n    def test_a(self):\n        with pytest.raises(ValueError, match='no'): fail()",
    "approx": "import pytest\ndef test_a(): assert add(0.1, 0.2) == pytest.approx(0.3)",
}  # fmt: skip
WRONG = "class Stack:\n    def push(self, x): return 7\ndef add(a, b): return 7\ndef fail(): return 7\n"


@pytest.mark.parametrize("name", PYTEST)
def test_pytest_decides_what_only_pytest_can_run(name: str, box: Any) -> None:
    limits = Limits(cpu_seconds=5, wall_seconds=patience(20), memory_mb=512)
    right, wrong = (box(box.sandbox.test_program(p, [PYTEST[name]], limits))[0] for p in (STACK, WRONG))
    assert right.outcome in (Outcome.PASSED, Outcome.UNCONFIRMED), right
    assert wrong.value == 0, wrong
    if name.startswith(("raises", "approx", "setup_method")):
        assert right.passed, right


def test_a_skip_inside_pytest_is_not_passed(box: Any) -> None:
    program = "import pytest\ndef add(a, b): pytest.skip('no')\n"
    (result,) = box(box.sandbox.test_program(program, [PYTEST["parameters of a function"]], Limits(cpu_seconds=5)))
    assert result.value == 0, result


# Something that one run changes and another could read without a clock.
CHANNEL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def tell(function, *args):
    try: function(*args); return 'told'
    except OSError: return 'refused'
def library(): return os.open(os.__file__, os.O_RDONLY)
def nowait(): return tell(os.preadv, library(), [bytearray(1)], 0, os.RWF_NOWAIT)
def usage():
    import resource
    return tell(resource.getrusage, resource.RUSAGE_SELF)
def children():
    child = os.fork()
    if child == 0: os._exit(0)
    found = tell(os.wait4, child, 0)
    os.waitpid(child, 0)
    return found
def syscall(number, *args):
    return 'told' if libc.syscall(number, *args) == 0 else 'refused'
def touch(): return tell(os.utime, '/dev/null')
def advise(): return os.posix_fadvise(library(), 0, 0, os.POSIX_FADV_DONTNEED)
"""


def test_runs_cannot_signal_each_other_without_a_clock(box: Any) -> None:
    if box.sandbox.layers.namespaces is None:
        pytest.skip("without namespaces programs start no processes")
    from upshot.sandbox.inside.syscall_table import numbers

    table = numbers()
    tests = [f"assert {name}() == 'refused'" for name in ("nowait", "usage", "children", "touch")]
    tests += [f"assert syscall({table[name]}, 0, 4096, 0, 0, 0) == 'refused'" for name in ("mincore", "cachestat")]
    tests += ["assert advise() is None"]  # taken but not followed
    results = box(box.sandbox.test_program(CHANNEL, tests))
    assert [result.outcome for result in results] == [Outcome.PASSED] * len(tests), results


def test_a_run_that_the_host_kills_is_a_sandbox_fault(box: Any) -> None:
    if box.sandbox.layers.namespaces is None:
        pytest.skip("without a PID namespace a program can send itself the same signal")

    async def run() -> Any:
        work = asyncio.create_task(box.sandbox.run("import time\ntime.sleep(60)", limits=Limits(cpu_seconds=30)))
        for _ in range(2):  # a fault is tried once more
            seen = await asyncio.to_thread(lambda: soon(_sleepers, 20) and _sleepers())
            for pid in seen or []:
                os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(soon, lambda gone=seen: not any(map(_alive, gone)), 20)
        return await work

    def _sleepers() -> list[int]:
        uid = box.sandbox.layers.uid_base
        return [
            int(p) for p in os.listdir("/proc") if p.isdigit() and _owner(p) in range(uid or -1, (uid or -1) + 1000)
        ]

    if box.sandbox.layers.uid_base is None:
        pytest.skip("runs have no user of their own to be found by")
    result = box(run())
    assert result.outcome is Outcome.SANDBOX_FAULT, result
    own = box(box.sandbox.run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\nos.abort()"))
    assert own.outcome is Outcome.ERROR, own


def _owner(pid: str) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def _alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


QUEUE = "class Queue:\n    def __init__(self): self.items = []\n    def put(self, x): self.items.append(x)\n    def get(self): return self.items.pop(0)\n    def __len__(self): return len(self.items)\n"
QUEUE_TEST = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        q = Queue()\n        q.put(3)\n        q.put(4)\n        self.assertEqual(q.get(), 3)\n        self.assertEqual(len(q), 1)\n    def test_b(self):\n        q = Queue()\n        self.assertIsInstance(q, Queue)"
REPLIES = {
    "right": QUEUE.replace("self.items.pop(0)", "self.items.pop(-len(self.items))"),
    "wrong": QUEUE.replace("self.items.pop(0)", "self.items.pop()"),
    "liar": LIE + "class Queue:\n    def put(self, x): pass\n    def get(self): return Lie()\n    def __len__(self): return 1\n",
    "dodge": PLAIN + LIE + "class Queue:\n    def put(self, x): os._exit(0) if JUDGED else None\n    def get(self): return Lie()\n    def __len__(self): return 1\n",
}  # fmt: skip


def test_a_policy_learns_the_right_program_of_a_class_row_and_not_one_that_fools_its_tests(box: Any) -> None:
    """A tabular policy over four replies, verdicts from the real sandbox, our advantages."""
    from tests.rewards.test_advantages import credits
    from upshot.rewards.advantages.grouped import estimator

    async def verdicts() -> dict[str, float | None]:
        verifier = verifiers.create("classeval", {}, sandbox=box.sandbox)
        row = {"solution_code": QUEUE, "test": QUEUE_TEST}
        return {
            name: (await verifier.verify(f"```python\n{text}```", None, row)).value for name, text in REPLIES.items()
        }

    earned = box(verdicts())
    assert earned == {"right": 1.0, "wrong": 0.0, "liar": 0.0, "dodge": 0.0}
    dice, compare, names = random.Random(0), estimator("grpo"), list(REPLIES)
    logits = dict.fromkeys(names, 0.0)
    for _ in range(60):
        weights = [math.exp(logits[name]) for name in names]
        acts = dice.choices(names, weights, k=8)
        for act, (advantage,) in zip(acts, compare([credits([earned[act] for act in acts])])[0], strict=True):
            for name, weight in zip(names, weights, strict=True):
                logits[name] += 0.2 * (advantage or 0.0) * ((name == act) - weight / sum(weights))
    assert math.exp(logits["right"]) / sum(map(math.exp, logits.values())) > 0.9
