"""The program of a reply is the block that defines what its tests need, wherever examples, tests and inputs are."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.patience import patience
from tests.tasks.verifiers.test_code import check
from upshot.tasks.verifiers.programs import READS, WRITES, names_needed, program_in

ADD = "def add(a, b):\n    return a + b\n"
DOUBLE = "n = int(input())\nprint(n * 2)\n"
STDIO = {READS, WRITES}


def reply(*bodies: str, word: str = "python") -> str:
    return "\n\n".join(f"So:\n```{word}\n{body.rstrip()}\n```" for body in bodies)


@pytest.mark.parametrize(
    ("later", "test"),
    [
        ("a = 1\nb = 2\nprint(add(a, b))", "assert add(a=1, b=2) == 3"),
        ("result = add(1, 2)\nexpected = 3", "result = add(1, 2)\nexpected = 3\nassert result == expected"),
        ("def test_add():\n    assert add(1, 2) == 3", "def test_add():\n    assert add(1, 2) == 3\ntest_add()"),
        ("def check(f):\n    assert f(1, 2) == 3\ncheck(add)", "def check(f):\n    assert f(1, 2) == 3\ncheck(add)"),
        ("from solution import add\nprint(add(1, 2))", "from solution import add\nassert add(1, 2) == 3"),
        ("import unittest\nclass TestCases(unittest.TestCase):\n    def test_a(self):\n        add(1, 2)",
         "import unittest\nclass TestCases(unittest.TestCase):\n    def test_a(self):\n        assert add(1, 2) == 3"),
        ("add(1, 2)", "assert add(1, 2) == 3\n" + "# " * 20_000),
    ],
)  # fmt: skip
def test_code_after_the_solution_that_uses_or_tests_it_is_not_the_program(later: str, test: str) -> None:
    assert program_in(reply(ADD, later), names_needed(test)) == ADD
    assert check("code", reply(ADD, later), [test]).value == 1


def test_a_humaneval_check_of_any_length_names_the_function_to_complete() -> None:
    again = "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)"
    for padding in ("", "inputs = [" + "1, " * 20_000 + "]\n"):
        test = f"{padding}def check(candidate):\n    assert candidate(1, 2) == 3"
        assert check("humaneval", reply(ADD, again), None, {"test": test, "entry_point": "add"}).value == 1


def test_tests_need_what_they_use_and_neither_define_nor_import_nor_find_among_builtins() -> None:
    test = "import math\ns = Stack(size=2)\nfor x in range(3):\n    s.push(x)\nassert math.floor(len(s)) == most(s)"
    assert names_needed(test) == {"Stack", "most"}
    assert names_needed("from solution import add as plus\nassert plus(1, 2) == 3") == {"add"}
    assert names_needed("def check(f): f(1)\nassert not Python(\ncheck(add)") == {
        "f",
        "Python",
    }  # as far as can be seen statically


@pytest.mark.parametrize(
    "later",
    [
        "# Example input: 3\n# prints 6\nprint(3 * 2)",
        "import sys, io\nsys.stdin = io.StringIO('3')\nprint(1)",
        "n = int(input())",
    ],
)
def test_a_program_for_stdin_reads_and_prints_whatever_comments_say(later: str) -> None:
    assert program_in(reply(DOUBLE, later), STDIO) == DOUBLE


@pytest.mark.parametrize("sample", ["input:\n3\noutput:\n6", "3", "3 4\n1 2", "[1, 2]", "3\n", "print nothing"])
def test_an_unnamed_sample_input_is_not_the_program(sample: str) -> None:
    assert program_in(reply(DOUBLE, sample, word=""), STDIO) == DOUBLE
    fixed = "x = 6\n"
    assert program_in(reply(fixed, sample, word=""), STDIO) == fixed


@pytest.mark.parametrize(
    "program",
    ["import sys\nprint(sys.stdin.read())", "print(open(0).read())", "import os\nos.write(1, os.read(0, 9))",
     "import fileinput\nfor line in fileinput.input(): print(line)", "print(open('/dev/stdin').read())",
     "from sys import stdin, stdout\nstdout.write(stdin.read())"],
)  # fmt: skip
def test_all_ways_to_read_an_input_count(program: str) -> None:
    assert program_in(reply(program, "print(3)"), STDIO) == program + "\n"


def test_the_last_version_is_the_program_even_where_it_is_broken() -> None:
    broken = "def add(a, b):\n    return a +\n"
    assert program_in(reply(ADD, broken), {"add"}) == broken
    assert program_in(reply(DOUBLE, "n = int(input()\nprint(n)"), STDIO) == "n = int(input()\nprint(n)\n"


@pytest.mark.parametrize(
    "bodies",
    [
        ("def helper(x):\n    return x + 1\n", "def solve(x):\n    return helper(x) * 2\n"),
        ("def solve(x):\n    return helper(x) * 2\n", "def helper(x):\n    return x + 1\n"),
        ("import math\n", "def half(x):\n    return math.floor(x / 2)\n", "def solve(x):\n    return 4 + half(x)\n"),
        ("class Base:\n    y = 4\n", "class Deep(Base):\n    pass\n", "def solve(x):\n    return Deep().y\n"),
    ],
)  # fmt: skip
def test_a_solution_in_several_blocks_is_joined_in_order(bodies: tuple[str, ...]) -> None:
    behind = (*bodies, "print(solve(1))\n")
    assert program_in(reply(*behind), {"solve"}) == "\n".join(bodies)
    assert check("code", reply(*behind), ["assert solve(1) == 4"]).value == 1


def test_only_blocks_that_the_tests_need_are_joined() -> None:
    one, two, other = "def one():\n    return 1\n", "def two():\n    return 2\n", "def other():\n    return 3\n"
    assert program_in(reply(one, other, two), {"one", "two"}) == f"{one}\n{two}"
    draft = "def helper(x):\n    return 0\ndef add(a, b):\n    return helper(a)\n"
    assert program_in(reply(draft, ADD), {"add"}) == ADD
    assert program_in(reply("n = int(input())\n", "print(n * 2)\n"), STDIO) == "n = int(input())\n\nprint(n * 2)\n"


DOCSTRING = 'def add(a, b):\n  """Use:\n  ```python\n  add(1, 2)\n  ```\n  """\n  return a + b\n'


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("1. Do:\n\n    ```python\n    def add(a, b):\n        return a + b\n    ```\n", ADD),
        ("- ```python\n  def add(a, b):\n      return a + b\n  ```\n", ADD),
        ("  ```python\ndef add(a, b):\n    return a + b\n  ```\n", ADD),
        (f"~~~python\n{ADD}~~~\n", ADD), (f"So ~~~ 3:\n```python\n{ADD}```", ADD),
        (f"````python\n{ADD}````", ADD), (f"So: ```python\n{ADD}```", ADD), (f"```python\n{ADD[:-1]}```", ADD[:-1]),
        (f"Call ```add``` so:\n```python\n{ADD}```", ADD), (f"```python\r\n{ADD}```\r\nDone.", ADD),
        (f"```python\n{DOCSTRING}```\nSo:\n```\n3\n```", DOCSTRING),
        (f"```python\n{DOCSTRING}{DOCSTRING.replace('add', 'sum')}```", DOCSTRING + DOCSTRING.replace("add", "sum")),
        ("```python\nfence = '```'\n```", "fence = '```'\n"),
        (f'```python\nx = """\n```\nBroken.\n```python\n{ADD}```', ADD),
        ("```python\n    return a + b\n```", "    return a + b\n"),
    ],
)  # fmt: skip
def test_fences_are_read_as_people_write_them(text: str, program: str) -> None:
    assert program_in(text, {"add"}) == program


HOSTILE: Any = {
    "tildes": "~~~ " * 47_000 + "`", "words": "```" + "a" * 190_000 + "`", "items": "1. " * 60_000 + "`",
    "quotes": "```\n'''\n```\n```\n\"\"\"\n```\n" * 8_000, "blocks": "```python\nx = y\n```\n" * 9_500,
    "deep": f"```\n{'-' * 90_000}1\n```\n```\n{'1+' * 45_000}1\n```", "ticks": "`" * 199_999,
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_reply_is_read_in_linear_time(text: str) -> None:
    started = time.process_time()
    program_in(text, STDIO)
    assert time.process_time() - started < patience(5)  # CPU seconds; anything quadratic takes minutes
