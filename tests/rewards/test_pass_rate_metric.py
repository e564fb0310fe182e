"""pass_rate: what it sends to the sandbox, and how it scores the answer."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from tests.tasks.participants.speakers import chat, speaker
from upshot.core.conversation import Conversation, Message
from upshot.core.errors import UserError
from upshot.models.base import Request
from upshot.rewards.build import build_metric
from upshot.sandbox.inside.cases import standalone
from upshot.sandbox.outcome import Outcome, TestResult
from upshot.tasks.collabllm import BigCodeBench

UNIT = """
import unittest
class TestCases(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.three = 3
    def test_one(self):
        self.assertEqual(add(1, 2), self.three)
    def test_two(self):
        self.assertEqual(add(1, 1), 3)
    def helper(self):
        pass
"""
PROGRAM = "Here you go:\n```python\ndef add(a, b):\n    return a + b\n```\nEnjoy!"


class InProcess:
    """A stand-in for the sandbox that runs trusted test programs here."""

    def __init__(self, fault: bool = False) -> None:
        self.fault = fault

    async def test_program(
        self, program: str, tests: list[str], limits: Any, given: str = "", language: str = "python"
    ) -> list[Any]:
        """Run asserts one after another."""
        if self.fault:
            return [TestResult(Outcome.SANDBOX_FAULT) for _ in tests]
        names: dict[str, Any] = {"__name__": "program"}
        results = []
        try:
            exec(program, names)
        except Exception:
            return [TestResult(Outcome.ERROR) for _ in tests]
        for test in tests:
            try:
                exec(standalone(test), names)
                results.append(TestResult(Outcome.PASSED))
            except Exception:
                results.append(TestResult(Outcome.WRONG))
        return results


def score(text: str, sandbox: Any = None, **row: Any):
    """pass_rate of one assistant message."""
    metric = build_metric("pass_rate", {}, sandbox=sandbox or InProcess())
    return asyncio.run(metric.score(chat("hi", text, **row)))


def test_the_share_of_asserts_that_pass() -> None:
    got = score(PROGRAM, tests=["assert add(1, 2) == 3", "assert add(0, 0) == 1"])
    assert got.value == 0.5 and got.detail["passed"] == 1 and got.detail["outcomes"] == ["passed", "wrong"]


def test_unittest_classes_count_by_method() -> None:
    assert score(PROGRAM, test=UNIT).value == 0.5
    assert score("```python\ndef add(a, b):\n    return 3\n```", test=UNIT).value == 1.0


def test_code_without_a_fence_is_the_message_itself() -> None:
    assert score("def add(a, b):\n    return a + b", tests=["assert add(1, 2) == 3"]).value == 1.0


@pytest.mark.parametrize(
    "after",
    [
        "An example:\n```python\nprint(add(1, 2))\n```",
        "It prints:\n```\n3\n```",
        "First:\n```bash\npip install numpy\n```",
    ],
)
def test_the_block_that_defines_what_is_tested_is_the_program(after: str) -> None:
    assert score(f"{PROGRAM}\n{after}", tests=["assert add(1, 2) == 3"]).value == 1.0


def test_a_failing_program_is_zero_but_a_failing_sandbox_is_missing() -> None:
    assert score("I cannot do that.", tests=["assert add(1, 2) == 3"]).value == 0.0
    assert score(PROGRAM, InProcess(fault=True), tests=["assert add(1, 2) == 3"]).reason == "sandbox_fault"


def test_without_tests_the_score_is_missing() -> None:
    assert score(PROGRAM).why == "pass_rate: no tests"


def test_without_a_sandbox_there_is_a_clear_error() -> None:
    with pytest.raises(UserError, match="needs a sandbox"):
        build_metric("pass_rate", {}, sandbox=None)


def test_code_arrow_pass_rate_takes_the_last_fence_of_the_whole_chat() -> None:
    metric = build_metric("code->pass_rate", {"extract": "fence"}, sandbox=InProcess())
    conversation = chat("hi", PROGRAM, "thanks", "You are welcome!", tests=["assert add(1, 2) == 3"])
    assert asyncio.run(metric.score(conversation)).value == 1.0
    empty = asyncio.run(metric.score(chat("hi", "What should it do?", tests=["assert add(1, 2) == 3"])))
    assert empty.value == 0.0 and empty.detail["absent"] is True


CHEAT = "```python\nimport unittest\nunittest.TestResult.wasSuccessful = lambda self: True\nunittest.TestCase.assertEqual = lambda *a: None\ndef add(a, b):\n    return 0\n```"  # fmt: skip  # noqa: E501


def test_a_program_that_patches_unittest_patches_only_itself() -> None:
    from upshot import sandbox

    async def main() -> list[Any]:
        async with sandbox.connect("local:slots=1") as runner:
            metric = build_metric("pass_rate", {}, sandbox=runner)
            empty = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        add(1, 2)"
            literal = empty.replace("add(1, 2)", "self.assertEqual(add(1, 2), 3)")
            return [await metric.score(chat("hi", CHEAT, test=test)) for test in (literal, empty)]

    cheat, empty = asyncio.run(main())
    assert cheat.value == 0.0, cheat
    assert empty.reason == "bad_row" and empty.why == "pass_rate: no valid test: it checks nothing", empty


def test_pass_rate_works_in_the_real_sandbox() -> None:
    from upshot import sandbox

    async def main() -> list[Any]:
        async with sandbox.connect("local") as runner:
            metric = build_metric("pass_rate", {}, sandbox=runner)
            rows: list[dict[str, Any]] = [{"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 1"]}, {"test": UNIT}]
            return [await metric.score(chat("hi", PROGRAM, **row)) for row in rows]

    asserts, units = asyncio.run(main())
    assert asserts.value == 0.5, asserts
    assert units.value == 0.5, units


def test_right_code_under_another_name_passes_once_it_is_extracted_in_the_form_the_tests_need() -> None:
    """The user never mentions the function's name; the judge who extracts the code is given it."""
    record = {
        "instruct_prompt": "Add two numbers.",
        "code_prompt": "def add(a, b):\n",
        "entry_point": "add",
        "test": UNIT,
    }
    row = BigCodeBench().parse(record)
    assert row is not None

    def judge(request: Request) -> str:
        asked = request.prompt[0].content
        assert "Add two numbers." in asked and "def add(a, b):" in asked
        (name,) = re.findall(r"The function the tests call is `(\w+)`", asked)
        return json.dumps({"found": True, "runnable code": f"def {name}(x, y):\n    return x + y"})

    options = {"sandbox": InProcess(), "judge": speaker(judge)}
    conversation = Conversation(row)
    conversation.say(Message("assistant", "```python\ndef plus(x, y):\n    return x + y\n```"))
    metric = build_metric("runnable code->pass_rate", {}, **options)
    assert asyncio.run(metric.score(conversation)).value == 0.5  # one of the two tests is deliberately wrong
    assert asyncio.run(build_metric("pass_rate", {}, **options).score(conversation)).value == 0.0
