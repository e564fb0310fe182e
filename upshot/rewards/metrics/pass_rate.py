"""The share of unit tests that the code passes, in the sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from upshot.config.bounds import Count, Positive
from upshot.core.conversation import Conversation, Row
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.rewards.metric import Metric, metrics
from upshot.rewards.metrics.extraction import last_fence
from upshot.tasks.verifiers.code import language_of, share_passed

if TYPE_CHECKING:
    from upshot.sandbox.runner import CodeRunner


@metrics.register("pass_rate")
class PassRate(Metric):
    """Passed tests / all tests of the program in the last assistant message (`code->pass_rate`: of the whole chat).

    The tests are the row's `meta['tests']`, a list of asserts, or `meta['test']`, the source of unittest classes
    (BigCodeBench). They stay outside the program's process. A sandbox's fault is missing, and so is a pass that no
    data confirms; a program that fails is 0. A row that names another language than Python is run in that one.
    """

    def __init__(
        self, sandbox: CodeRunner | None = None, cpu_seconds: Positive = 10.0, memory_mb: Count = 1024
    ) -> None:
        """Make the metric; the limits hold for one program with all its tests."""
        if sandbox is None:
            raise UserError("the metric 'pass_rate' needs a sandbox; the recipe's `sandbox` is 'local' or a URL")
        self.sandbox = sandbox
        self.cpu_seconds = cpu_seconds
        self.memory_mb = memory_mb

    async def score(self, conversation: Conversation) -> Score:
        """The share of tests passed; missing without tests, without a message, or where the sandbox fails."""
        last = conversation.last("assistant")
        if last is None:
            return Score.missing(Reason.NOTHING_SAID)
        tests = tests_of(conversation.row)
        if not tests:
            return Score.missing(Reason.BAD_ROW, "pass_rate: no tests")
        fenced = last_fence(last.content)
        program = last.content if fenced is None else fenced
        if not program.strip():
            return Score(0.0, detail={"passed": 0, "tests": len(tests), "why": "no program"})
        from upshot.sandbox.limits import Limits

        limits = Limits(cpu_seconds=self.cpu_seconds, memory_mb=self.memory_mb)
        language = language_of(None, conversation.row.meta)
        return share_passed(await self.sandbox.test_program(program, tests, limits, language=language), "pass_rate")


def tests_of(row: Row) -> list[str]:
    """The row's tests: asserts given as such, or the source of unittest classes, once for every method."""
    from upshot.sandbox.inside.cases import each_method

    asserts = row.meta.get("tests")
    if asserts:
        return [str(test) for test in asserts]
    source = row.meta.get("test")
    return each_method(source) if isinstance(source, str) and source.strip() else []
