"""What each check of a row can decide, measured once with a program known to be right.

Whether data can decide a check is a property of the check and not of the program that is tested. So the row's
reference solution goes through both looks of the sandbox, and each check gets a kind:

- *decidable*: the judge confirmed the reference. Any other program must be confirmed, too.
- *believed*: the reference passes plainly, but the judge cannot confirm it. The plain look decides.
- *broken*: the reference fails it, or passes it only sometimes. The check is left out.

A row without a reference is profiled by the form of its checks: literals in and literals out are decidable, anything
else is believed. A program that the judge later confirms is kept as that row's reference for the next measurement.
"""

from __future__ import annotations

import ast
import enum
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from upshot.sandbox.asserts.values import split
from upshot.sandbox.inside.cases import NOTHING_CHECKED
from upshot.sandbox.limits import Limits
from upshot.sandbox.outcome import Outcome, TestResult
from upshot.tasks.verifiers.programs import parse

Look = Callable[[str, Limits], Awaitable[list[TestResult]]]
"""Runs a program on the checks of its row, within these limits."""
LOOKS = 2
"""Measurements of a reference; each draws its own random numbers, so one that depends on them shows."""


class CheckKind(enum.StrEnum):
    """What a check can decide."""

    DECIDABLE = "decidable"
    BELIEVED = "believed"
    BROKEN = "broken"


@dataclass(frozen=True)
class RowChecks:
    """The checks of a row, the program known to pass them, and how to run a program on them."""

    name: str
    """The row's own name, for messages."""
    tests: Sequence[Any]
    """Texts of asserts, `StdioTest`, or calls of a function (`FunctionCall`)."""
    look: Look
    limits: Limits
    reference: str | None = None
    given: str = ""
    language: str = "python"
    runner: str = ""
    """The kind of sandbox: some have no judge."""

    @property
    def identity(self) -> list[Any]:
        """All that a profile depends on, besides the sandbox."""
        run = [self.runner, self.language, self.limits.cpu_seconds, self.limits.memory_mb]
        return [*run, self.reference, self.given, [repr(test) for test in self.tests]]


@dataclass(frozen=True)
class RowProfile:
    """The kind of each check of a row."""

    kinds: tuple[CheckKind, ...]
    basis: str
    """'reference', 'form', or 'program': one that was confirmed before."""
    reasons: dict[int, str] = field(default_factory=dict)
    """By index, why a check is not decidable."""

    @property
    def summary(self) -> str:
        """One word for the row: decidable, partly, believed or broken."""
        kept = {kind for kind in self.kinds if kind is not CheckKind.BROKEN}
        if not kept:
            return "broken"
        return "partly" if len(kept) == 2 else str(*kept)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"kinds": list(self.kinds), "basis": self.basis, "reasons": self.reasons}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RowProfile:
        """From JSON, whose keys are text."""
        reasons = {int(index): str(why) for index, why in data["reasons"].items()}
        return cls(tuple(map(CheckKind, data["kinds"])), data["basis"], reasons)


def profile_by_form(checks: RowChecks) -> RowProfile:
    """The profile of a row without a reference, read off its tests."""
    kinds = tuple(CheckKind.DECIDABLE if _is_literal(t, checks.language) else CheckKind.BELIEVED for t in checks.tests)
    believed = [index for index, kind in enumerate(kinds) if kind is CheckKind.BELIEVED]
    why = "no reference, and its form is more than calls and literals"
    return RowProfile(kinds, "form", dict.fromkeys(believed, why))


def _is_literal(test: Any, language: str) -> bool:
    if not isinstance(test, str):
        return True  # an input with its output, or a call with its result
    return language == "python" and (split(test) is not None or _is_literal_check(test))


@functools.lru_cache(maxsize=4096)
def _is_literal_check(test: str) -> bool:
    """Whether a test is a `check(candidate)`, or methods of a TestCase, and asserts nothing but calls and literals."""
    tree = parse(test)
    body = tree.body if tree is not None else []
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    defined = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    called = [node for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    if len(defined) != 1 or len(imports) + len(defined) + len(called) != len(body):
        return False
    functions = [part for part in (defined[0], *defined[0].body) if isinstance(part, ast.FunctionDef)]
    asserts = [_as_assert(node) for function in functions for node in function.body]
    return bool(asserts) and split("\n".join(map(ast.unparse, (*imports, *asserts)))) is not None


def _as_assert(node: ast.stmt) -> ast.stmt:
    """`self.assertEqual(a, b)` and its like as an assert; another statement as it is."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
        return node
    first, second = call.args[0], call.args[1] if len(call.args) > 1 else None
    match call.func.attr:
        case "assertEqual" | "assertListEqual" | "assertDictEqual" | "assertTupleEqual" if second is not None:
            return ast.Assert(ast.Compare(first, [ast.Eq()], [second]))
        case "assertTrue":
            return ast.Assert(first)
        case "assertFalse":
            return ast.Assert(ast.UnaryOp(ast.Not(), first))
        case "assertIsNone":
            return ast.Assert(ast.Compare(first, [ast.Is()], [ast.Constant(None)]))
    return node


async def measure(checks: RowChecks, program: str, basis: str = "reference") -> RowProfile | None:
    """The profile that a program known to be right shows; None where the sandbox failed."""
    # Half of what a judged look may take: programs slower than the reference must still be decided in time.
    limits = replace(checks.limits, judge_seconds=checks.limits.judged.cpu_seconds / 2)
    looks = [await checks.look(program, limits) for _ in range(LOOKS)]
    kinds, reasons = [], {}
    for index, results in enumerate(zip(*looks, strict=True)):
        if any(result.outcome is Outcome.SANDBOX_FAULT for result in results):
            return None
        passing = (Outcome.PASSED, Outcome.UNCONFIRMED)
        failed = next((r for r in results if r.outcome not in passing or r.detail == NOTHING_CHECKED), None)
        doubted = next((r for r in results if not r.passed), None)
        kinds.append(CheckKind.BROKEN if failed else CheckKind.BELIEVED if doubted else CheckKind.DECIDABLE)
        if seen := failed or doubted:
            sometimes = "only sometimes: " if failed and any(r is not failed and r.passed for r in results) else ""
            reasons[index] = f"{sometimes}{seen.outcome}: {seen.detail.strip()[-300:]}"
    return RowProfile(tuple(kinds), basis, reasons)


def is_witness(profile: RowProfile, results: Sequence[TestResult]) -> bool:
    """Whether a program shows more than the form of its row's checks: it scores 1, and the judge confirms one of those
    that are believed."""
    scored = all(r.outcome in (Outcome.PASSED, Outcome.INVALID_TEST) for r in decide(results, profile))
    pairs = zip(profile.kinds, results, strict=True)
    return profile.basis == "form" and scored and any(k is CheckKind.BELIEVED and r.passed for k, r in pairs)


def decide(results: Sequence[TestResult], profile: RowProfile, strict: bool = False) -> list[TestResult]:
    """The results that count, by the kind of their check: an unconfirmed one is a failure, or believed.

    strict: believed checks are left out, whatever the program made of them. Were only their passes left out, a row
    that has no other check would score nothing but failures.
    """
    left_out = {CheckKind.BROKEN, CheckKind.BELIEVED} if strict else {CheckKind.BROKEN}
    counted = [(r, kind) for r, kind in zip(results, profile.kinds, strict=True) if kind not in left_out]
    unconfirmed, believed = Outcome.UNCONFIRMED, CheckKind.BELIEVED
    return [r.believe() if r.outcome is unconfirmed and kind is believed else r for r, kind in counted]
