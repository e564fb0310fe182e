"""Counts of what a sandbox has done, as its server's /metrics shows them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from upshot.core.http_server import metrics_page
from upshot.sandbox.outcome import Outcome, RunResult, TestResult


class SandboxMetrics:
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
        self.tests.update(result.outcome for result in results)

    def count_run(self, result: RunResult) -> None:
        """Count one plain run."""
        self.programs += 1
        self.runs[result.outcome] += 1

    def page(self, running: int, waiting: int, slots: int) -> str:
        """In Prometheus' text format."""
        counters = {
            "programs": self.programs,
            "tests": {outcome: self.tests[outcome] for outcome in Outcome},
            "runs": {outcome: self.runs[outcome] for outcome in Outcome},
            "faults": self.faults,
            "rejected": self.rejected,
            "busy_seconds": self.busy_seconds,
        }
        uptime = time.time() - self.started
        gauges = {"running": running, "waiting": waiting, "slots": slots, "uptime_seconds": uptime}
        return metrics_page("upshot_sandbox", counters, gauges)
