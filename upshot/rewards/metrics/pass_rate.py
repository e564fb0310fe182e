"""The share of unit tests that the code passes, in the sandbox."""

from __future__ import annotations

from upshot.config.bounds import Count, Positive
from upshot.core.conversation import Conversation, Row
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.rewards.metric import Metric, metrics
from upshot.rewards.metrics.extraction import last_fence
from upshot.sandbox.limits import Limits
from upshot.sandbox.outcome import TestResult
from upshot.sandbox.runner import CodeRunner
from upshot.tasks.verifiers.code import defines, language_of, names_in, share_passed
from upshot.tasks.verifiers.profile import RowChecks
from upshot.tasks.verifiers.profile_store import Verdicts
from upshot.tasks.verifiers.programs import each_method, program_in


@metrics.register("pass_rate")
class PassRate(Metric):
    """Passed tests / all tests of the program in the last assistant message (`code->pass_rate`: of the whole chat).

    Among several code blocks, the program is the one that defines what the tests call, with those that it needs.

    The tests are the row's `meta['tests']`, a list of asserts, or `meta['test']`, the source of unittest classes
    (BigCodeBench). What a pass is worth depends on the row's profile, measured with its reference. A fault of the
    sandbox is missing; a program that fails is 0. A row that names another language than Python is run in that one.
    """

    def __init__(
        self,
        sandbox: CodeRunner | None = None,
        cpu_seconds: Positive = 10.0,
        memory_mb: Count = 1024,
        verdicts: Verdicts | None = None,
    ) -> None:
        """Make the metric; the limits hold for one program with all its tests."""
        if sandbox is None:
            raise UserError("the metric 'pass_rate' needs a sandbox; set sandbox to 'local' or a URL")
        self.sandbox = sandbox
        self.limits = Limits(cpu_seconds=cpu_seconds, memory_mb=memory_mb)
        self.verdicts = verdicts or Verdicts()

    async def score(self, conversation: Conversation) -> Score:
        """The share of tests passed; missing without tests, without a message, or where the sandbox fails."""
        last = conversation.last("assistant")
        if last is None:
            return Score.missing(Reason.NOTHING_SAID)
        checks = self.checks(conversation.row)
        if not checks.tests:
            return Score.missing(Reason.BAD_ROW, "pass_rate: no tests")
        fenced = last_fence(last.content)
        program = last.content
        if fenced is not None:
            program = program_in(program, names_in(checks.tests), checks.language) or fenced
        if not program.strip():
            return Score(0.0, detail={"passed": 0, "tests": len(checks.tests), "why": "no program"})
        return share_passed(await self.verdicts.judge(checks, program), "pass_rate")

    def checks(self, row: Row) -> RowChecks:
        """The checks of a row, as profiles are made of them."""
        source, language = row.meta.get("test"), language_of(None, row.meta)
        tests = [str(test) for test in row.meta.get("tests") or ()]
        if not tests and isinstance(source, str) and source.strip():
            tests = each_method(source)

        async def look(program: str, limits: Limits) -> list[TestResult]:
            return await self.sandbox.test_program(program, tests, limits, language=language)

        known = row.reference if isinstance(row.reference, str) and language == "python" else ""
        reference = known if defines(known, names_in(tests)) else None
        runner = type(self.sandbox).__name__
        return RowChecks(row.id, tests, look, self.limits, reference, language=language, runner=runner)
