"""The interface of all sandboxes: in process, our server, the compatible API, SandboxFusion, or a bare subprocess."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from upshot.core.errors import UserError
from upshot.core.time_limit import pause_clock
from upshot.sandbox.asserts.verdict import same_output
from upshot.sandbox.inside.cases import find_faults
from upshot.sandbox.limits import Limits
from upshot.sandbox.local.languages import canonical
from upshot.sandbox.outcome import Outcome, RunResult, StdioTest, TestResult

Test = TypeVar("Test", str, StdioTest)
COMPILE_SECONDS = 20.0
NO_JUDGE = "it passed in the program's own process, and there is no judge here to confirm it"


class Resource:
    """An object that holds processes or connections until it is closed; an async context manager."""

    async def aclose(self) -> None:
        """Release processes and connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class Session(Resource, abc.ABC):
    """A Python session that keeps its state between turns."""

    @abc.abstractmethod
    async def turn(self, code: str, cpu_seconds: float | None = None) -> RunResult:
        """Run code in the session; the value of a last expression is printed."""


@dataclass(frozen=True, slots=True)
class ProgramJob:
    """A program to run, with its input and files."""

    code: str
    language: str
    stdin: str
    files: Mapping[str, bytes]
    limits: Limits
    fetch: Sequence[str]
    """Files to bring back."""
    compile_seconds: float


class CodeRunner(Resource, abc.ABC):
    """Runs untrusted programs and reports the results."""

    limits: Limits
    """Limits of calls that set none."""

    async def test_program(
        self,
        program: str,
        tests: Sequence[str],
        limits: Limits | None = None,
        given: str = "",
        language: str = "python",
    ) -> list[TestResult]:
        """Run assert tests against a program; one result per test.

        `given` is the row's own code (imports, helpers of its prompt): it is trusted, and the program cannot change it.
        In languages other than Python, a test is text appended to the program, and no judge can confirm its pass.
        """
        chosen = limits or self.limits
        if canonical(language) == "python":
            results = await self._test(program, tests, given, chosen)
            # Whether a test is invalid depends on its text alone, so no program can blame its failure on the test.
            faults = find_faults(tuple(tests))
            invalid = {index: TestResult(Outcome.INVALID_TEST, None, why) for index, why in faults.items()}
            return [invalid.get(index, result) for index, result in enumerate(results)]
        return await _or_invalid(tests, self._test_text(program, tests, language, chosen))

    @abc.abstractmethod
    async def _test(self, program: str, tests: Sequence[str], given: str, limits: Limits) -> list[TestResult]:
        """The results of assert tests of a Python program, every default filled in."""

    async def _test_text(self, program: str, tests: Sequence[str], language: str, limits: Limits) -> list[TestResult]:
        """The results of tests that are appended to a program in any language."""

        async def run_test(test: str) -> TestResult:
            done = (await self.run(f"{program}\n{test}", language, limits=limits)).as_test(passed=True)
            return replace(done, outcome=Outcome.UNCONFIRMED, detail=NO_JUDGE) if done.passed else done

        return await run_one_by_one(tests, run_test)

    async def test_stdio(
        self, program: str, tests: Sequence[StdioTest], limits: Limits | None = None, language: str = "python"
    ) -> list[TestResult]:
        """Run a program once per test on its input and compare the output; one result per test.

        If the language cannot be run here, every test is an `invalid_test` with the reason.
        """
        done = self._test_stdio(program, tests, language, limits or self.limits)
        return await (done if canonical(language) == "python" else _or_invalid(tests, done))

    async def _test_stdio(
        self, program: str, tests: Sequence[StdioTest], language: str, limits: Limits
    ) -> list[TestResult]:
        """The results of stdin/stdout tests, one run for each."""

        async def run_test(test: StdioTest) -> TestResult:
            roomy = replace(limits, output_kb=output_kb(test, limits))
            result = await self.run(program, language, test.input, limits=roomy)
            return result.as_test(passed=same_output(result.stdout, test.output))

        return await run_one_by_one(tests, run_test)

    @pause_clock
    async def run(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        fetch: Sequence[str] = (),
        compile_seconds: float = COMPILE_SECONDS,
    ) -> RunResult:
        """Run a program and return what it printed; `fetch` names files to bring back."""
        job = ProgramJob(code, language, stdin, files or {}, limits or self.limits, fetch, compile_seconds)
        return await self._run(job)

    @abc.abstractmethod
    async def _run(self, job: ProgramJob) -> RunResult:
        """Run a program, every default filled in."""

    async def session(self, limits: Limits | None = None) -> Session:
        """Open a stateful Python session, if the runner supports them."""
        raise UserError(f"{type(self).__name__} has no sessions; use a local sandbox or an Upshot sandbox server")


def output_kb(test: StdioTest, limits: Limits) -> int:
    """Limits with enough room for a test's expected output."""
    return max(limits.output_kb, (2 * len(test.output) >> 10) + 1)


async def _or_invalid(tests: Sequence[Any], done: Awaitable[list[TestResult]]) -> list[TestResult]:
    """The results. If the language is refused, every test reports it; the program has not failed."""
    try:
        return await done
    except UserError as error:
        return [TestResult(Outcome.INVALID_TEST, None, str(error)) for _ in tests]


async def run_one_by_one(tests: Sequence[Test], run_test: Callable[[Test], Awaitable[TestResult]]) -> list[TestResult]:
    """Run each test in a separate run; after a timeout the rest is not run."""
    done: list[TestResult] = []
    for test in tests:
        if done and done[-1].outcome is Outcome.TIMEOUT:
            done.append(TestResult(Outcome.TIMEOUT, None, "not run: an earlier test ran out of time"))
        else:
            done.append(await run_test(test))
    return done
