"""Counts for /metrics, in the Prometheus text format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from upshot.sandbox.outcome import Outcome, RunResult, TestResult


class Metrics:
    """What the sandbox has done since it started."""

    def __init__(self) -> None:
        self.started = time.time()
        self.tests: Counter[Outcome] = Counter()
        self.runs: Counter[Outcome] = Counter()
        self.programs = 0
        self.faults = 0
        self.rejected = 0
        self.busy_seconds = 0.0

    def count_tests(self, results: Iterable[TestResult]) -> None:
        """Count one program's test results."""
        self.programs += 1
        for result in results:
            self.tests[result.outcome] += 1

    def count_run(self, result: RunResult) -> None:
        """Count one plain run."""
        self.programs += 1
        self.runs[result.outcome] += 1

    def render(self, running: int, waiting: int, slots: int) -> str:
        """The metrics page."""
        lines = [
            "# TYPE upshot_sandbox_programs_total counter",
            f"upshot_sandbox_programs_total {self.programs}",
            "# TYPE upshot_sandbox_tests_total counter",
            *(f'upshot_sandbox_tests_total{{outcome="{outcome}"}} {self.tests[outcome]}' for outcome in Outcome),
            "# TYPE upshot_sandbox_runs_total counter",
            *(f'upshot_sandbox_runs_total{{outcome="{outcome}"}} {self.runs[outcome]}' for outcome in Outcome),
            "# TYPE upshot_sandbox_faults_total counter",
            f"upshot_sandbox_faults_total {self.faults}",
            "# TYPE upshot_sandbox_rejected_total counter",
            f"upshot_sandbox_rejected_total {self.rejected}",
            "# TYPE upshot_sandbox_busy_seconds_total counter",
            f"upshot_sandbox_busy_seconds_total {self.busy_seconds:.3f}",
            "# TYPE upshot_sandbox_running gauge",
            f"upshot_sandbox_running {running}",
            "# TYPE upshot_sandbox_waiting gauge",
            f"upshot_sandbox_waiting {waiting}",
            "# TYPE upshot_sandbox_slots gauge",
            f"upshot_sandbox_slots {slots}",
            "# TYPE upshot_sandbox_uptime_seconds gauge",
            f"upshot_sandbox_uptime_seconds {time.time() - self.started:.0f}",
        ]
        return "\n".join(lines) + "\n"
