# ruff: noqa: E501 (the programs are one line each)
"""What a row's checks can decide is measured with its reference, once per row and not per program."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from upshot.sandbox.limits import Limits
from upshot.sandbox.outcome import Outcome, StdioTest, TestResult
from upshot.tasks.verifiers.base import verifiers
from upshot.tasks.verifiers.profile import RowChecks, decide, measure, profile_by_form
from upshot.tasks.verifiers.profile_store import FILE, Verdicts, profiles_beside

PASSED, WRONG, UNCONFIRMED, FAULT = Outcome.PASSED, Outcome.WRONG, Outcome.UNCONFIRMED, Outcome.SANDBOX_FAULT
LITERAL, PROPERTY = "assert f(2) == 4", "assert abs(f(2) - 4) < 1e-6"


class Scripted:
    """A check whose outcomes are given, call after call, by program."""

    def __init__(self, **outcomes: list[list[Outcome]]) -> None:
        self.outcomes = outcomes
        self.asked: list[str] = []

    async def __call__(self, program: str, limits: Limits) -> list[TestResult]:
        turn = self.asked.count(program)
        self.asked.append(program)
        rounds = self.outcomes[program]
        return [TestResult(outcome, detail="why") for outcome in rounds[min(turn, len(rounds) - 1)]]


def checks(look: Any, tests: list[Any] | None = None, reference: str | None = "right") -> RowChecks:
    return RowChecks("row 1", tests or [LITERAL, PROPERTY], look, Limits(), reference)


def results(*outcomes: Outcome) -> list[TestResult]:
    return [TestResult(outcome) for outcome in outcomes]


def kinds(look: Scripted) -> list[str] | None:
    profile = asyncio.run(measure(checks(look), "right"))
    return None if profile is None else [str(kind) for kind in profile.kinds]


def test_a_check_is_classified_by_running_the_reference() -> None:
    assert kinds(Scripted(right=[[PASSED, UNCONFIRMED]])) == ["decidable", "believed"]
    assert kinds(Scripted(right=[[PASSED, WRONG]])) == ["decidable", "broken"]
    assert kinds(Scripted(right=[[PASSED, Outcome.INVALID_TEST]])) == ["decidable", "broken"]


def test_a_reference_that_depends_on_chance_is_found() -> None:
    assert kinds(Scripted(right=[[PASSED, PASSED], [PASSED, WRONG]])) == ["decidable", "broken"]
    assert kinds(Scripted(right=[[PASSED, PASSED], [PASSED, UNCONFIRMED]])) == ["decidable", "believed"]


def test_the_reason_says_whether_a_check_fails_always_or_only_sometimes() -> None:
    looks = [[WRONG, WRONG, UNCONFIRMED, PASSED], [WRONG, PASSED, UNCONFIRMED, PASSED]]
    profile = asyncio.run(measure(checks(Scripted(right=looks)), "right"))
    assert profile is not None
    assert profile.reasons == {0: "wrong: why", 1: "only sometimes: wrong: why", 2: "unconfirmed: why"}


def test_a_fault_of_the_sandbox_measures_nothing() -> None:
    assert kinds(Scripted(right=[[PASSED, FAULT]])) is None


@pytest.mark.parametrize(
    ("test", "kind"),
    [
        (LITERAL, "decidable"),
        ("assert Solution().f([1], 'a') is True", "decidable"),
        ("def check(candidate):\n    assert candidate(2) == 4\n    assert candidate([1]) == []\ncheck(f)", "decidable"),
        (StdioTest("1", "2"), "decidable"),
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(2), 4)\n        self.assertTrue(f([1]))",
            "decidable",
        ),
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        s = Stack()\n        self.assertEqual(s.pop(), 4)",
            "believed",
        ),
        (PROPERTY, "believed"),
        ("import os\nassert os.path.exists(f())", "believed"),
        ("def check(candidate):\n    for i in range(3):\n        assert candidate(i) == i\ncheck(f)", "believed"),
        ("not Python", "believed"),
    ],
)
def test_without_a_reference_the_form_of_a_check_decides(test: Any, kind: str) -> None:
    assert [*profile_by_form(checks(None, [test], None)).kinds] == [kind]


def test_in_another_language_nothing_is_decidable_by_form() -> None:
    row = RowChecks("row 1", [LITERAL], Scripted(), Limits(), language="cpp")
    assert [*profile_by_form(row).kinds] == ["believed"]


def verdict(look: Scripted, mode: str = "profile", program: str = "mine") -> list[tuple[Outcome, bool]]:
    async def run() -> list[TestResult]:
        return await Verdicts(mode).judge(checks(look), program)  # type: ignore[arg-type]

    return [(result.outcome, result.believed) for result in asyncio.run(run())]


def test_a_pass_that_could_have_been_confirmed_and_was_not_is_a_failure() -> None:
    look = Scripted(right=[[PASSED, UNCONFIRMED]], mine=[[UNCONFIRMED, UNCONFIRMED]])
    assert verdict(look) == [(UNCONFIRMED, False), (PASSED, True)]


def test_a_plain_failure_is_a_failure_whatever_the_profile() -> None:
    look = Scripted(right=[[PASSED, UNCONFIRMED]], mine=[[WRONG, WRONG]])
    assert verdict(look) == [(WRONG, False), (WRONG, False)]


def test_a_broken_check_is_left_out() -> None:
    look = Scripted(right=[[WRONG, PASSED]], mine=[[WRONG, PASSED]])
    assert verdict(look) == [(PASSED, False)]


@pytest.mark.parametrize(
    ("known", "mode", "asked"),
    [
        ([PASSED, UNCONFIRMED], "profile", True),
        ([UNCONFIRMED, UNCONFIRMED], "profile", False),
        ([UNCONFIRMED, UNCONFIRMED], "strict", False),
        ([PASSED, PASSED], "believe", False),
    ],
)
def test_the_judge_is_asked_only_where_it_can_decide_something(known: list[Outcome], mode: Any, asked: bool) -> None:
    seen: list[float | None] = []

    async def look(program: str, limits: Limits) -> list[TestResult]:
        seen.append(limits.judge_seconds)
        return results(*known)

    asyncio.run(Verdicts(mode).judge(checks(look), "mine"))
    assert (seen[-1] != 0) is asked


def test_believe_takes_every_plain_pass_and_measures_nothing() -> None:
    look = Scripted(mine=[[UNCONFIRMED, WRONG]])
    assert verdict(look, "believe") == [(PASSED, True), (WRONG, False)] and look.asked == ["mine"]


def test_strict_leaves_out_the_checks_that_the_judge_cannot_decide_whatever_a_program_makes_of_them() -> None:
    known = [[PASSED, UNCONFIRMED]]
    for believed in (UNCONFIRMED, PASSED, WRONG):
        assert verdict(Scripted(right=known, mine=[[PASSED, believed]]), "strict") == [(PASSED, False)]
        assert verdict(Scripted(right=[[UNCONFIRMED] * 2], mine=[[believed] * 2]), "strict") == []


def test_a_row_is_measured_once_however_many_programs_come_at_the_same_time() -> None:
    look = Scripted(right=[[PASSED, UNCONFIRMED]], mine=[[PASSED, UNCONFIRMED]])

    async def run() -> None:
        rule, row = Verdicts(), checks(look)
        await asyncio.gather(*(rule.judge(row, "mine") for _ in range(8)))

    asyncio.run(run())
    assert look.asked.count("right") == 2


def test_profiles_are_kept_beside_the_data_and_the_first_one_counts(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    file = profiles_beside(str(data))
    assert file == profiles_beside(str(tmp_path)) == tmp_path / FILE
    look = Scripted(right=[[PASSED, UNCONFIRMED]])
    first = asyncio.run(Verdicts(file=file).profile(checks(look)))
    other = Scripted(right=[[PASSED, WRONG]])
    assert asyncio.run(Verdicts(file=file).profile(checks(other))) == first and not other.asked


def test_processes_that_measure_at_the_same_time_agree(tmp_path: Path) -> None:
    one, two = (Verdicts(file=tmp_path / FILE) for _ in range(2))
    two._load()
    first = asyncio.run(one.profile(checks(Scripted(right=[[PASSED, UNCONFIRMED]]))))
    two._locks.clear()
    late = Scripted(right=[[PASSED, PASSED]])
    asyncio.run(two._measure(next(iter(one._profiles)), checks(late), "right", "reference"))
    assert asyncio.run(two.profile(checks(late))) == first


def test_a_changed_row_or_sandbox_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = Scripted(right=[[PASSED, PASSED]])
    rule = Verdicts(file=tmp_path / FILE)
    asyncio.run(rule.profile(checks(look)))
    asyncio.run(rule.profile(checks(look, [LITERAL, LITERAL])))
    assert len(look.asked) == 4
    monkeypatch.setattr("upshot.tasks.verifiers.profile_store.version", lambda: "another")
    asyncio.run(Verdicts(file=tmp_path / FILE).profile(checks(look)))
    assert len(look.asked) == 6


def test_a_confirmed_program_stands_in_for_a_reference_at_the_next_measurement_only(tmp_path: Path) -> None:
    look = Scripted(honest=[[PASSED, PASSED]], liar=[[PASSED, UNCONFIRMED]])
    row, file = checks(look, reference=None), tmp_path / FILE

    def of(rule: Verdicts, program: str) -> list[bool]:
        return [result.believed for result in asyncio.run(rule.judge(row, program))]

    running = Verdicts(file=file)
    assert of(running, "liar") == [False, True]
    assert of(running, "honest") == [False, False]
    assert of(running, "liar") == [False, True]  # a verdict does not depend on which program came first
    asyncio.run(Verdicts(file=file).measure_all([row]))
    refined = Verdicts(file=file)
    assert asyncio.run(refined.profile(row)).basis == "program"
    assert decide(results(PASSED, UNCONFIRMED), asyncio.run(refined.profile(row)))[1].outcome is UNCONFIRMED


def test_a_confirmed_program_that_fails_when_it_is_measured_breaks_no_check(tmp_path: Path) -> None:
    look = Scripted(turncoat=[[PASSED, PASSED], [WRONG, PASSED]])
    row, rule = checks(look, reference=None), Verdicts(file=tmp_path / FILE)
    asyncio.run(rule.judge(row, "turncoat"))
    (profile,) = asyncio.run(rule.measure_all([row]))
    assert look.asked.count("turncoat") > 1 and profile.basis == "form"


def test_a_folder_that_cannot_be_written_costs_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rule = Verdicts(file=tmp_path / "file" / FILE)
    assert asyncio.run(rule.profile(checks(Scripted(right=[[PASSED, PASSED]])))).summary == "decidable"


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("humaneval", {"stub": "def f(x):\n", "entry_point": "f", "test": "def check(c):\n    assert c(2) == 4", "canonical_solution": "    return x * x\n"}),
        ("code", {"test_list": [LITERAL], "code": "def f(x):\r\n    return x * x"}),
        ("bigcodebench", {"code_prompt": "import math\ndef task_func(x):\n", "canonical_solution": "    return x * x", "test": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(task_func(2), 4)"}),
        ("code", {"test_list": ["assert sum(2, 3) == 5"], "code": "def sum(a, b):\n    return a + b"}),
        ("classeval", {"import_statement": ["import math"], "solution_code": "class A:\n    def f(self): return 4", "test": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(A().f(), 4)"}),
    ],
)  # fmt: skip
def test_the_reference_of_a_public_set_is_found_and_is_a_whole_program(name: str, extra: dict[str, Any]) -> None:
    row = verifiers.create(name, {}, sandbox=object()).checks(None, extra)  # type: ignore[attr-defined]
    assert row.reference is not None and len(row.tests) == 1
    compile(row.reference, name, "exec")


def test_a_column_that_is_not_a_solution_is_not_a_reference() -> None:
    for text in ("The sum is taken twice.", "def g(): pass", ""):
        row = verifiers.create("code", {}, sandbox=object()).checks([LITERAL], {"solution": text})  # type: ignore[attr-defined]
        assert row.reference is None


def test_no_program_makes_a_check_weaker_than_its_form(tmp_path: Path) -> None:
    """One that is confirmed where checks are believed, and lies where data would have shown it."""
    look = Scripted(liar=[[UNCONFIRMED, PASSED]], turncoat=[[PASSED, PASSED], [UNCONFIRMED, PASSED]])
    row = checks(look, reference=None)
    for number, program in enumerate(("liar", "turncoat")):
        rule = Verdicts(file=tmp_path / str(number) / FILE)
        asyncio.run(rule.judge(row, program))
        (profile,) = asyncio.run(rule.measure_all([row]))
        assert profile.kinds[0] == "decidable"
        assert (program == "turncoat") == (look.asked.count(program) > 1)
