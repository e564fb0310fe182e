"""The outcome of a run or a test."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace


class Outcome(enum.StrEnum):
    """How a run or a test ended, under the API's names."""

    PASSED = "passed"
    WRONG = "wrong"
    ERROR = "error"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"
    KILLED_BY_POLICY = "killed_by_policy"
    INVALID_TEST = "invalid_test"
    UNCONFIRMED = "unconfirmed"
    SANDBOX_FAULT = "sandbox_fault"


@dataclass(frozen=True)
class TestResult:
    """One test: its outcome, how long it took, and why."""

    __test__ = False

    outcome: Outcome
    seconds: float | None = None
    """Time of the test as the child measured it; None if it did not finish."""
    detail: str = ""
    """The end of the traceback, the reason of a fault, or empty."""
    believed: bool = False
    """Whether it counts as passed because of the plain look alone."""

    @property
    def value(self) -> float | None:
        """1 for a pass, 0 for a failure, None for a fault, an invalid test, and a pass that the judge did not confirm.

        What an unconfirmed pass is worth depends on the row (`tasks/verifiers/profile.py`), unknown to the sandbox.
        """
        if self.outcome in (Outcome.SANDBOX_FAULT, Outcome.INVALID_TEST, Outcome.UNCONFIRMED):
            return None
        return 1.0 if self.outcome is Outcome.PASSED else 0.0

    @property
    def passed(self) -> bool:
        """Whether the test passed."""
        return self.outcome is Outcome.PASSED

    def believe(self) -> TestResult:
        """The same test, passed by the plain look alone."""
        return replace(self, outcome=Outcome.PASSED, believed=True)


@dataclass(frozen=True)
class StdioTest:
    """One stdin/stdout test."""

    input: str
    output: str


@dataclass(frozen=True)
class CompileResult:
    """The compiler's output."""

    ok: bool
    seconds: float
    exit_code: int | None
    output: str
    timed_out: bool = False


@dataclass(frozen=True)
class RunResult:
    """One run of a program: `passed` means it ended by itself with exit code 0."""

    outcome: Outcome
    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    stdout_cut: bool = False
    """Whether output beyond the limit was dropped."""
    stderr_cut: bool = False
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    max_rss_kb: int = 0
    detail: str = ""
    compiled: CompileResult | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    """The requested files, by name."""

    def as_test(self, passed: bool) -> TestResult:
        """The run as a test, which is passed or not if the run came to its end."""
        if self.outcome is Outcome.PASSED:
            outcome = Outcome.PASSED if passed else Outcome.WRONG
            return TestResult(outcome, self.wall_seconds, "" if passed else f"printed {self.stdout[:200]!r}")
        failed_assert = self.outcome is Outcome.ERROR and "AssertionError" in self.stderr
        outcome = Outcome.WRONG if failed_assert else self.outcome
        messages = self.stderr or (self.compiled.output if self.compiled else "")
        return TestResult(outcome, self.wall_seconds, "\n".join(filter(None, (self.detail, messages[-2000:]))))
