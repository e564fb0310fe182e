"""Programs against tests, through the sandbox: asserts, stdin/stdout, and the shapes of the public sets.

A program in the language that the row names; where the sandbox does not run it the score is missing. What a pass is
worth depends on the row's profile (`profile.py`): a check that the judge can decide must be confirmed, a check that it
cannot decide goes by the plain look, and a broken one is left out. Only a fault of the sandbox and a row without a
check that works are missing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from upshot.config.bounds import Count, Positive
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.sandbox.limits import Limits
from upshot.sandbox.local.languages import canonical
from upshot.sandbox.outcome import Outcome, StdioTest, TestResult
from upshot.tasks.verifiers.base import BadRow, Extra, Verifier, as_json_text, decode_json, verifiers
from upshot.tasks.verifiers.function_rows import FunctionCall, function_calls, with_imports
from upshot.tasks.verifiers.profile import RowChecks
from upshot.tasks.verifiers.profile_store import Verdicts
from upshot.tasks.verifiers.programs import READS, WRITES, each_method, list_defined, names_needed, parse, program_in

MAX_TESTS = 200
TEST_COLUMNS = (
    *("test_list", "tests", "assert_case", "test_imports", "test_setup_code", "challenge_test_list"),
    *("public_tests", "private_tests", "generated_tests", "input_output", "inputs", "outputs", "test_cases"),
)
"""Columns that tests are read from; the ground truth of a prepared row holds what they say."""
_WORD = re.compile(r"[A-Za-z_]\w*")
LANGUAGE_COLUMNS = ("language", "lang", "programming_language")
_SPOKEN = frozenset(("", "en", "english", "zh", "chinese", "multilingual"))
"""What a column `language` says in sets that mean the language of the question."""
SOLUTIONS = ("canonical_solution", "solution_code", "reference_solution", "code", "solution")
"""Columns of a program known to be right."""
NAMES = ("task_id", "id", "row_id", "name")


def language_of(reference: Any, extra: Extra) -> str:
    """The language that a row wants its program in, by its own name; Python where it names none."""
    for row in (extra, decode_json(extra.get("verification_info")), decode_json(reference)):
        for column in LANGUAGE_COLUMNS if isinstance(row, Mapping) else ():
            if (name := canonical(str(row.get(column) or ""))) not in _SPOKEN:
                return "python" if name.startswith("py") else name
    return "python"


class CodeVerifier(Verifier):
    """Runs a program's tests; 1 when all pass, with `partial` the share that does."""

    waits = True
    needs = ("sandbox", "reference")

    def __init__(
        self,
        partial: bool = False,
        cpu_seconds: Positive = 6.0,
        max_tests: Count = 50,
        sandbox: Any = None,
        verdicts: Verdicts | None = None,
    ) -> None:
        """partial: grade by the share of passed tests. max_tests: run at most this many tests, the first ones."""
        self.partial = partial
        self.graded = partial
        self.limits = Limits(cpu_seconds=cpu_seconds)
        self.max_tests = min(max_tests, MAX_TESTS)
        self.sandbox = sandbox
        self.verdicts = verdicts or Verdicts()

    async def verify(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict."""
        if self.sandbox is None:
            raise UserError("code is verified in a sandbox, and there is none: set sandbox (or --sandbox)")
        checks = self.checks(reference, extra)
        tests, language = checks.tests, checks.language
        if not tests:
            return Score.missing(Reason.BAD_ROW, "code: no tests in the row")
        if language != "python" and any(isinstance(test, FunctionCall) for test in tests):
            why = f"code: the tests call a Python function, and the row asks for {language}"
            return Score.missing(Reason.BAD_ROW, why)
        written = program_in(response, self.names(tests), language)
        if written is None:
            return Score(0.0, detail={"fault": f"no {language} program in the response", "tests": len(tests)})
        share = share_passed(await self.verdicts.judge(checks, self.program(written, extra)), "code")
        return share if self.partial or share.value is None else Score(float(share.value == 1), detail=share.detail)

    def checks(self, reference: Any, extra: Extra) -> RowChecks:
        """The checks of a row, as profiles are made of them."""
        tests, given = self.tests(reference, extra)[: self.max_tests], self.given(extra)
        language = language_of(reference, extra)
        look = functools.partial(self.run, tests=tests, given=given, language=language)
        known = self.solution(tests, extra) if language == "python" else None
        name = str(next((extra[key] for key in NAMES if extra.get(key) is not None), "without a name"))
        return RowChecks(name, tests, look, self.limits, known, given, language, type(self.sandbox).__name__)

    def solution(self, tests: Sequence[Any], extra: Extra) -> str | None:
        """The row's reference solution, ready to run; None where it has none that defines what the tests call."""
        text = next((extra[key] for key in SOLUTIONS if isinstance(extra.get(key), str) and extra[key].strip()), None)
        program = self.program(text, extra) if text is not None else ""
        return program if defines(program, self.names(tests)) else None

    def program(self, program: str, extra: Extra) -> str:
        """What is run; shapes that complete a given beginning put it in front."""
        return program

    def given(self, extra: Extra) -> str:
        """What the row brings along of which the tests may use something: trusted, and not the program's to change."""
        return ""

    def names(self, tests: Sequence[Any]) -> set[str]:
        """The names that tests need, by which the program is known among the blocks of a response."""
        return names_in(tests)

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """The tests of a row."""
        raise NotImplementedError

    @classmethod
    def some_tests(cls, reference: Any, extra: Extra) -> list[Any]:
        """The first tests of a row, as many as are ever run; `BadRow` where there are none."""
        tests = cls().tests(reference, extra)[:MAX_TESTS]
        if not tests:
            raise BadRow("no tests")
        return tests

    async def run(
        self, program: str, limits: Limits, tests: Sequence[Any], language: str, given: str = ""
    ) -> list[TestResult]:
        """Results of assert-like tests."""
        return list(await self.sandbox.test_program(program, tests, limits, given, language))


def names_in(tests: Sequence[Any]) -> set[str]:
    """The names that tests need of a program."""
    return {name for test in tests[:20] for name in names_needed(str(test))}


def defines(program: str, names: set[str]) -> bool:
    """Whether a text is a program that defines one of the names; any program does where there are none."""
    tree = parse(program) if program.strip() else None
    return tree is not None and (not names or bool(names & {*list_defined(tree), READS, WRITES}))


def share_passed(results: Sequence[TestResult], who: str) -> Score:
    """The share of the checks that passed; missing where the sandbox failed, or where no check of the row works."""
    outcomes = [str(result.outcome) for result in results]
    if Outcome.SANDBOX_FAULT in outcomes:
        return Score.missing(Reason.SANDBOX_FAULT, f"{who}: sandbox_fault", outcomes=outcomes[:50])
    valid = [result for result in results if result.outcome != Outcome.INVALID_TEST]
    if not valid:
        why = f"no valid test: {results[0].detail[:300]}" if results else "every check of the row is broken or left out"
        return Score.missing(Reason.BAD_ROW, f"{who}: {why}", outcomes=outcomes[:50])
    passed = sum(result.outcome == Outcome.PASSED for result in valid)
    counts = {"unconfirmed": outcomes.count(Outcome.UNCONFIRMED), "believed": sum(result.believed for result in valid)}
    detail = {
        "passed": passed,
        "tests": len(valid),
        "outcomes": outcomes[:50],
        "first_failure": next((r.detail for r in valid if r.outcome != Outcome.PASSED), "")[:500],
    }
    return Score(passed / len(valid), detail=detail | {name: count for name, count in counts.items() if count})


@verifiers.register("code", "mbpp", "google-research-datasets/mbpp", "evalplus/mbppplus", "TIGER-Lab/AceCode-87K")
class AssertsVerifier(CodeVerifier):
    """Python with assert statements: a list (or JSON list) in the reference, `test_list` or `tests`."""

    @classmethod
    def ground_truth(cls, reference: Any, extra: Extra) -> str:
        """The asserts."""
        return as_json_text(cls.some_tests(reference, extra))

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """The asserts."""
        asserts = first_list(reference, extra, ("test_list", "tests", "assert_case"))
        setup = "\n".join(extra.get("test_imports") or []) or str(extra.get("test_setup_code") or "")
        return [f"{setup}\n{test}" if setup else str(test) for test in asserts]


@verifiers.register("code-stdio", "code_stdio", "livecodebench", "PrimeIntellect/verifiable-coding-problems")
class StdioVerifier(CodeVerifier):
    """A program that reads stdin and writes stdout: [{input, output}], {inputs, outputs}, or `verification_info`."""

    @classmethod
    def ground_truth(cls, reference: Any, extra: Extra) -> str:
        """The inputs with their outputs."""
        tests = cls.some_tests(reference, extra)
        if not _is_stdio(tests[0]):
            inputs, outputs = [test.arguments for test in tests], [test.expected for test in tests]
            return as_json_text({"fn_name": tests[0].function, "inputs": inputs, "outputs": outputs})
        return as_json_text([{"input": test.input, "output": test.output} for test in tests])

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """The input/output pairs."""
        value = decode_json(reference) or decode_json(extra.get("verification_info")) or extra
        calls = function_calls(value, extra)
        return [*calls] or [StdioTest(*pair) for pair in stdio_pairs(value)]

    def names(self, tests: Sequence[Any]) -> set[str]:
        """Of a program that reads its input, the words for that; of a function, its name."""
        return {name for test in tests for name in ((READS, WRITES) if _is_stdio(test) else (test.function,))}

    async def run(
        self, program: str, limits: Limits, tests: Sequence[Any], language: str, given: str = ""
    ) -> list[TestResult]:
        """Results of stdin/stdout tests, or of the calls of a function."""
        if all(map(_is_stdio, tests)):
            return list(await self.sandbox.test_stdio(program, tests, limits, language))
        texts = [test.as_assert(program) for test in tests if not _is_stdio(test)]
        return list(await self.sandbox.test_program(with_imports(program), texts, limits))


def _is_stdio(test: Any) -> bool:
    return not isinstance(test, FunctionCall)


@verifiers.register("code-contests", "code_contests", "deepmind/code_contests", "codeforces", "apps", "taco")
class ContestVerifier(StdioVerifier):
    """Public, private and generated tests of a contest problem, or of one whose wrong solution must be repaired."""

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """Tests of all the columns there are."""
        pairs: list[tuple[str, str]] = []
        row = {**extra, **(decode_json(reference) if isinstance(decode_json(reference), Mapping) else {})}
        for value in (row, decode_json(row.get("input_output")), decode_json(reference)):
            if calls := function_calls(value, row):
                return [*calls]
        for column in ("public_tests", "private_tests", "generated_tests", "input_output", "test_inputs_outputs"):
            pairs += stdio_pairs(decode_json(row.get(column)))
        pairs = pairs or stdio_pairs(decode_json(reference))
        return [StdioTest(*pair) for pair in pairs]


@verifiers.register("humaneval", "openai/openai_humaneval", "openai_humaneval", "evalplus/humanevalplus")
class HumanEvalVerifier(CodeVerifier):
    """A function to complete, checked by `check(candidate)`: columns prompt, test, entry_point."""

    def program(self, program: str, extra: Extra) -> str:
        """The completion behind its prompt, or the program alone where it defines the function itself."""
        stub, entry = self._read_stub(extra)
        if re.search(rf"^[ \t]*(?:async[ \t]+)?def {re.escape(entry)}\b", program, re.MULTILINE) or not stub:
            return f"{self.given(extra)}\n{program}"
        return stub + program

    def given(self, extra: Extra) -> str:
        """Imports and helpers of the prompt, before the function to write."""
        stub, entry = self._read_stub(extra)
        return stub.split(f"def {entry}")[0] if entry and stub else ""

    def _read_stub(self, extra: Extra) -> tuple[str, str]:
        """How the program begins, and the name of the function to write."""
        columns = ("stub", "prompt_code", "code_prompt")
        return str(next(filter(None, map(extra.get, columns)), "")), str(extra.get("entry_point", ""))

    def names(self, tests: Sequence[Any]) -> set[str]:
        """What the check is called with: the function to complete, or its class."""
        return {name for test in tests for name in _WORD.findall(test.rpartition("check(")[2])[:1]}

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """One test: the check function and its call."""
        test = str(extra.get("test") or reference or "")
        entry = str(extra.get("entry_point", ""))
        return [f"{test}\n\ncheck({entry})"] if test and entry else []


@verifiers.register("bigcodebench", "bigcode/bigcodebench")
class BigCodeVerifier(CodeVerifier):
    """A function with a unittest.TestCase named TestCases in the column test."""

    def program(self, program: str, extra: Extra) -> str:
        """The program behind the imports of its stub, or behind the whole stub where it is the function's body."""
        stub, entry = str(extra.get("code_prompt") or ""), str(extra.get("entry_point") or "task_func")
        return f"{self.given(extra)}\n{program}" if not stub or f"def {entry}" in program else stub + program

    def given(self, extra: Extra) -> str:
        """The imports of the stub."""
        return str(extra.get("code_prompt") or "").split("def ")[0]

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """A test for each method."""
        test = str(extra.get("test") or reference or "")
        return list(each_method(test)) if "TestCase" in test else []


@verifiers.register("classeval", "FudanSELab/ClassEval")
class ClassEvalVerifier(CodeVerifier):
    """A class to write, checked by the unittest classes in the column test."""

    def program(self, program: str, extra: Extra) -> str:
        """The program behind the imports of its row."""
        return f"{self.given(extra)}\n{program}"

    def given(self, extra: Extra) -> str:
        """The imports."""
        lines = decode_json(extra.get("import_statement")) or []
        return "\n".join([lines] if isinstance(lines, str) else map(str, lines))

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """A test for each method."""
        return list(each_method(str(extra.get("test") or reference or "")))


def first_list(reference: Any, extra: Extra, keys: Sequence[str]) -> list[Any]:
    """The tests as a list: the reference itself, or the first of the columns that has some."""
    value = decode_json(reference)
    if isinstance(value, Mapping):
        value = next((value[key] for key in keys if value.get(key)), None)
    if isinstance(value, str) and "assert" in value:
        return [value]
    columns = (value, *(decode_json(extra.get(key)) for key in keys))
    return list(next((column for column in columns if isinstance(column, list | tuple) and column), ()))


def stdio_pairs(value: Any) -> list[tuple[str, str]]:
    """(input, output) pairs from a list of them or from two lists side by side."""
    if isinstance(value, Mapping):
        if inner := decode_json(value.get("tests") or value.get("test_cases")):
            return stdio_pairs(inner)
        inputs = value.get("inputs", value.get("input"))
        outputs = value.get("outputs", value.get("output"))
        if isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple):
            return [(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=False)]
        return [(str(inputs), str(outputs))] if inputs is not None and outputs is not None else []
    if isinstance(value, list | tuple):
        return [pair for item in value for pair in stdio_pairs(item) if isinstance(item, Mapping)]
    return []


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
