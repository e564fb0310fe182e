"""Programs written to break the verdict: liars that pass the plain check, and honest ones that a judge may misjudge.

Files of cases are under `outsiders/`: `#### name`, the program, `----`, its test (further tests after further dashes).
Wrong programs that merely pass a weak test are left out: no judge could tell.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.patience import patience
from upshot.sandbox import Limits, Outcome

CASES = Path(__file__).parent / "outsiders"
LIMITS = Limits(cpu_seconds=4, wall_seconds=patience(20), memory_mb=1024)


def load(name: str) -> list[tuple[str, str, list[str]]]:
    """(name, program, tests) of every case in a file."""
    found = []
    for text in (CASES / f"{name}.txt").read_text().removeprefix("#### ").split("\n#### "):
        title, _, body = text.partition("\n")
        program, *tests = body.rstrip("\n").split("\n----\n")
        found.append((title, program, tests))
    return found


def outcomes_of(name: str, box: Any) -> dict[str, list[Outcome]]:
    """The sandbox's outcome for every case."""
    cases = load(name)

    async def run() -> list[Any]:
        return await asyncio.gather(*(box.sandbox.test_program(p, tests, LIMITS) for _, p, tests in cases))

    return {title: [r.outcome for r in found] for (title, _, _), found in zip(cases, box(run()), strict=True)}


def test_no_liar_passes(box: Any) -> None:
    found = outcomes_of("forged", box)
    assert len(found) > 100
    assert not [title for title, outcomes in found.items() if all(one is Outcome.PASSED for one in outcomes)]


def test_no_honest_program_is_convicted(box: Any) -> None:
    """A program that cannot be judged is unconfirmed, which a profile turns into a believed check."""
    found = outcomes_of("honest", box)
    fair = {Outcome.PASSED, Outcome.UNCONFIRMED}
    assert len(found) > 100
    assert not {title: outcomes for title, outcomes in found.items() if not set(outcomes) <= fair}


LOCKS = """
import fcntl, os, sqlite3
def shared():
    first, second = open(os.__file__), open(os.__file__)
    fcntl.flock(first, fcntl.LOCK_EX)
    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return "nobody is told"
def kept():
    with sqlite3.connect("own.db") as base:
        base.execute("create table t (x)")
        base.execute("insert into t values (3)")
    return sqlite3.connect("own.db").execute("select x from t").fetchone()[0]
"""


def test_file_locks_cannot_signal_other_runs_and_programs_that_lock_still_work(box: Any) -> None:
    tests = ["assert shared() == 'nobody is told'", "assert kept() == 3"]
    assert [one.outcome for one in box(box.sandbox.test_program(LOCKS, tests))] == [Outcome.PASSED] * 2
