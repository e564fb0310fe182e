"""The profiles of a task's rows, measured before a run: what the judge can decide, and which references fail.

`upshot train --dry-run` and `upshot data prepare` print the table. Profiles are kept beside the data, where a run finds
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upshot.config.recipe import Recipe
from upshot.core.conversation import Row
from upshot.core.event_loop import run_anywhere
from upshot.rewards.build import build_metric
from upshot.rewards.metrics.pass_rate import PassRate
from upshot.sandbox.connection import connect
from upshot.sandbox.runner import CodeRunner
from upshot.tasks.base import Task, tasks
from upshot.tasks.datasets.files import read_tables
from upshot.tasks.tables import TableTask
from upshot.tasks.verified import VerifiedTask
from upshot.tasks.verifiers.base import verifiers
from upshot.tasks.verifiers.code import CodeVerifier
from upshot.tasks.verifiers.profile import RowChecks, RowProfile
from upshot.tasks.verifiers.profile_store import Verdicts, profiles_beside, profiles_of

MOST_ROWS = 1000
"""The first rows of a task are looked through before the run, the others when they are played."""
SUMMARIES = {
    "decidable": "a program must be confirmed by the judge",
    "partly": "some checks must be confirmed; the plain run decides the others",
    "believed": "the plain run decides",
    "broken": "left out: the reference fails",
}
NAMED = 5
"""Broken rows that are named."""
Table = list[tuple[str, RowProfile]]


def profile_task(recipe: Recipe) -> str:
    """Measure the rows of a recipe's task, and say what the judge can decide; empty where no program is tested."""
    if not recipe.train.samples or recipe.verdict == "believe":
        return ""
    task = tasks.create(recipe.task.name, recipe.task.options, "task")
    rates = [m.options for m in recipe.reward.metrics if m.name.rpartition("->")[2] == "pass_rate"]
    rows = task.rows("train")
    table = profile_rows(rows[:MOST_ROWS], task, recipe.sandbox, profiles_of(task), rates[0] if rates else None)
    return describe_table(table, len(rows)) if table else ""


def profile_rows(
    rows: Sequence[Row], task: Task, sandbox: str, file: Path | None, pass_rate: Mapping[str, Any] | None = None
) -> Table:
    """The name and the profile of each row whose program is tested, kept in the file.

    pass_rate: the options of that metric, where it tests the programs of rows without a verifier.
    """

    async def measure() -> Table:
        async with connect(sandbox) as runner:
            by_row = [checks_of(row, task, runner, pass_rate) for row in rows]
            checks = [one for one in by_row if one is not None and one.tests]
            profiles = await Verdicts(file=file).measure_all(checks)
            return [(one.name, profile) for one, profile in zip(checks, profiles, strict=True)]

    tested = any(code_verifier(row, task) for row in rows) or pass_rate is not None
    return run_anywhere(measure()) if tested else []


def profile_files(files: Sequence[str], out: Path, task: TableTask, sandbox: str) -> str:
    """Measure the rows of prepared files of a task, and say what the judge can decide; the profiles are kept in `out`.

    A task with a hidden goal tests programs by the metric `pass_rate`.
    """
    metrics: Mapping[str, float] = getattr(task, "metrics", {})
    rate = next((name for name in metrics if name.rpartition("->")[2] == "pass_rate"), None)
    options = None if rate is None else getattr(task, "options", {}).get(rate, {})
    tables = [(split, records) for file in files for split, records in read_tables(file).items()]
    rows = [row for split, records in tables for row in task.parse_table(split, records)]
    table = profile_rows(rows, task, sandbox, profiles_beside(str(out)), options)
    return describe_table(table, len(table)) if table else ""


def checks_of(row: Row, task: Task, runner: CodeRunner, pass_rate: Mapping[str, Any] | None) -> RowChecks | None:
    """The checks of a row's program, by its verifier or by the metric `pass_rate`; None where it has none."""
    # `bigcodebench` names a verifier and a task with a hidden goal, whose programs are the metric's to test.
    by_metric = pass_rate is not None and not isinstance(task.part(row), VerifiedTask)
    verifier = None if by_metric else code_verifier(row, task)
    if verifier is not None:
        verifier.sandbox = runner
        return verifier.checks(row.reference, row.meta)
    if pass_rate is None:
        return None
    metric = build_metric("pass_rate", pass_rate, "reward.metrics", sandbox=runner)
    assert isinstance(metric, PassRate)
    return metric.checks(row)


def code_verifier(row: Row, task: Task) -> CodeVerifier | None:
    """The verifier of a row's program; None where it has none."""
    part = task.part(row)
    name, options = part.verifier_of(row) if isinstance(part, VerifiedTask) else (row.source, {})
    kind = verifiers.get(name) if name in verifiers else None
    return kind(**options) if isinstance(kind, type) and issubclass(kind, CodeVerifier) else None


def describe_table(table: Table, count: int) -> str:
    """How many rows the judge can decide, and the names of those whose reference fails."""
    sums = Counter(profile.summary for _, profile in table)
    most = f" (the first of {count:,})" if len(table) < count else ""
    lines = [f"tests of {len(table):,} rows{most}"]
    lines += [f"  {name:<10} {sums[name]:>6,}   {meaning}" for name, meaning in SUMMARIES.items()]
    broken = [(name, profile) for name, profile in table if profile.summary == "broken"]
    for name, profile in broken[:NAMED]:
        why = next(iter(profile.reasons.values())).split("\n")
        lines.append(f"    row {name}: {why[-1][:120]}")
    return "\n".join(lines + ([f"    … and {len(broken) - NAMED} more"] if len(broken) > NAMED else []))
