"""Programs against tests, through the sandbox: asserts, stdin/stdout, and the shapes of the public sets.

A row that names a language is run in that one; where the sandbox does not run it the score is missing. A test that the
sandbox itself failed to run is missing, not failed; so is a pass that no data confirms (undecided). A test that can
tell nothing of any program does not count; without a valid one the score is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from upshot.config.bounds import Count, Positive
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.sandbox.local.languages import canonical
from upshot.tasks.verifiers.base import BadRow, Extra, Verifier, as_json_text, decode_json, verifiers
from upshot.tasks.verifiers.function_rows import FunctionCall, function_calls, with_imports
from upshot.tasks.verifiers.programs import READS, WRITES, names_needed, program_in

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
        self, partial: bool = False, cpu_seconds: Positive = 6.0, max_tests: Count = 50, sandbox: Any = None
    ) -> None:
        """partial: grade by the share of passed tests. max_tests: at most so many are run, the first ones."""
        self.partial = partial
        self.graded = partial
        self.cpu_seconds = cpu_seconds
        self.max_tests = min(max_tests, MAX_TESTS)
        self.sandbox = sandbox

    async def verify(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict."""
        if self.sandbox is None:
            raise UserError("code is verified in a sandbox, and there is none: set sandbox (or --sandbox)")
        tests = self.tests(reference, extra)[: self.max_tests]
        if not tests:
            return Score.missing(Reason.BAD_ROW, "code: no tests in the row")
        language = language_of(reference, extra)
        if language != "python" and any(isinstance(test, FunctionCall) for test in tests):
            return Score.missing(
                Reason.BAD_ROW, f"code: the tests call a Python function, and the row wants {language}"
            )
        program = program_in(response, self.names(tests), language)
        if program is None:
            return Score(0.0, detail={"fault": f"no {language} program in the response", "tests": len(tests)})
        results = await self.run(self.program(program, extra), tests, self.given(extra), language)
        share = share_passed(results, "code", self.partial)
        return share if self.partial or share.value is None else Score(float(share.value == 1), detail=share.detail)

    def program(self, program: str, extra: Extra) -> str:
        """What is run; shapes that complete a given beginning put it in front."""
        return program

    def given(self, extra: Extra) -> str:
        """What the row brings along of which the tests may use something: trusted, and not the program's to change."""
        return ""

    def names(self, tests: Sequence[Any]) -> set[str]:
        """The names that tests need, by which the program is known among the blocks of a response."""
        return {name for test in tests[:20] for name in names_needed(str(test))}

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

    async def run(self, program: str, tests: Sequence[Any], given: str, language: str) -> list[Any]:
        """Results of assert-like tests."""
        return list(await self.sandbox.test_program(program, tests, self._limits(), given, language))

    def _limits(self) -> Any:
        from upshot.sandbox.limits import Limits

        return Limits(cpu_seconds=self.cpu_seconds)


def share_passed(results: Sequence[Any], who: str, graded: bool = True) -> Score:
    """The share of the valid tests that passed; missing where the sandbox failed or no test can tell anything.

    Where a test is undecided the share is unknown, and missing; of all or nothing (not `graded`) a failure is enough.
    """
    outcomes = [str(result.outcome) for result in results]
    if "sandbox_fault" in outcomes:
        return Score.missing(Reason.SANDBOX_FAULT, f"{who}: sandbox_fault", outcomes=outcomes[:50])
    values = [result.value for result in results if result.value is not None]
    believed = sum(getattr(result, "believed", False) for result in results)
    undecided = [result for result in results if result.outcome == "undecided"]
    if undecided and (graded or all(values)):  # one that failed decides where all must pass
        why = f"{who}: {len(undecided)} of {len(results)} tests passed, but undecided: {undecided[0].detail[:200]}"
        return Score.missing(Reason.UNDECIDED, why, outcomes=outcomes[:50])
    if not values:
        why = f"{who}: no valid test: {results[0].detail[:300]}"
        return Score.missing(Reason.BAD_ROW, why, outcomes=outcomes[:50])
    detail = {
        "passed": int(sum(values)),
        "tests": len(values),
        "outcomes": outcomes[:50],
        "first_failure": next((result.detail for result in results if result.value == 0), "")[:500],
    }
    if believed:
        detail["believed"] = believed
    return Score(sum(values) / len(values), detail=detail)


@verifiers.register("code", "mbpp", "google-research-datasets/mbpp", "evalplus/mbppplus", "TIGER-Lab/AceCode-87K")
class AssertsVerifier(CodeVerifier):
    """Python with assert statements: a list (or JSON list) in the reference, `test_list` or `tests`."""

    @classmethod
    def ground_truth(cls, reference: Any, extra: Extra) -> str:
        """The asserts."""
        return as_json_text(cls.some_tests(reference, extra))

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """The asserts."""
        given = first_list(reference, extra, ("test_list", "tests", "assert_case"))
        setup = "\n".join(extra.get("test_imports") or []) or str(extra.get("test_setup_code") or "")
        return [f"{setup}\n{test}" if setup else str(test) for test in given]


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
        from upshot.sandbox.outcome import StdioTest

        value = decode_json(reference) or decode_json(extra.get("verification_info")) or extra
        calls = function_calls(value, extra)
        return [*calls] or [StdioTest(given, wanted) for given, wanted in stdio_pairs(value)]

    def names(self, tests: Sequence[Any]) -> set[str]:
        """Of a program that reads its input, the words for that; of a function, its name."""
        return {name for test in tests for name in ((READS, WRITES) if _is_stdio(test) else (test.function,))}

    async def run(self, program: str, tests: Sequence[Any], given: str, language: str) -> list[Any]:
        """Results of stdin/stdout tests, or of the calls of a function."""
        if all(map(_is_stdio, tests)):
            return list(await self.sandbox.test_stdio(program, tests, self._limits(), language))
        texts = [test.as_assert(program) for test in tests if not _is_stdio(test)]
        return list(await self.sandbox.test_program(with_imports(program), texts, self._limits()))


def _is_stdio(test: Any) -> bool:
    return not isinstance(test, FunctionCall)


@verifiers.register(
    "code-contests",
    "code_contests",
    "code_contests_modify_code",
    "deepmind/code_contests",
    "codeforces",
    "apps",
    "taco",
)
class ContestVerifier(StdioVerifier):
    """Public, private and generated tests of a contest problem, or of one whose wrong solution is to be mended."""

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """Tests of all the columns there are."""
        from upshot.sandbox.outcome import StdioTest

        found: list[tuple[str, str]] = []
        row = {**extra, **(decode_json(reference) if isinstance(decode_json(reference), Mapping) else {})}
        for value in (row, decode_json(row.get("input_output")), decode_json(reference)):
            if calls := function_calls(value, row):
                return [*calls]
        for column in ("public_tests", "private_tests", "generated_tests", "input_output", "test_inputs_outputs"):
            found += stdio_pairs(decode_json(row.get(column)))
        found = found or stdio_pairs(decode_json(reference))
        return [StdioTest(given, wanted) for given, wanted in found]


@verifiers.register("humaneval", "openai/openai_humaneval", "openai_humaneval", "evalplus/humanevalplus")
class HumanEvalVerifier(CodeVerifier):
    """A function to complete, checked by `check(candidate)`: columns prompt, test, entry_point."""

    def program(self, program: str, extra: Extra) -> str:
        """The completion behind its prompt, or the program alone where it defines the function itself."""
        entry = str(extra.get("entry_point", ""))
        stub = str(extra.get("stub") or extra.get("prompt_code") or extra.get("code_prompt") or "")
        if re.search(rf"^[ \t]*(?:async[ \t]+)?def {re.escape(entry)}\b", program, re.MULTILINE) or not stub:
            return f"{self.given(extra)}\n{program}"
        return stub + program

    def given(self, extra: Extra) -> str:
        """Imports and helpers of the prompt, before the function to write."""
        stub = str(extra.get("stub") or extra.get("prompt_code") or extra.get("code_prompt") or "")
        entry = str(extra.get("entry_point", ""))
        return stub.split(f"def {entry}")[0] if entry and stub else ""

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
        """The program behind the imports of its stub."""
        return f"{self.given(extra)}\n{program}" if extra.get("code_prompt") else program

    def given(self, extra: Extra) -> str:
        """The imports of the stub."""
        return str(extra.get("code_prompt") or "").split("def ")[0]

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """A test for each method."""
        from upshot.sandbox.inside.cases import each_method

        test = str(extra.get("test") or reference or "")
        return list(each_method(test)) if "TestCase" in test else []


def first_list(reference: Any, extra: Extra, keys: Sequence[str]) -> list[Any]:
    """The tests as a list: the reference itself, or the first of the columns that has some."""
    value = decode_json(reference)
    if isinstance(value, Mapping):
        value = next((value[key] for key in keys if value.get(key)), None)
    if isinstance(value, list | tuple) and value:
        return list(value)
    if isinstance(value, str) and "assert" in value:
        return [value]
    for key in keys:
        value = decode_json(extra.get(key))
        if isinstance(value, list | tuple) and value:
            return list(value)
    return []


def stdio_pairs(value: Any) -> list[tuple[str, str]]:
    """(input, output) pairs from a list of them or from two lists side by side."""
    if isinstance(value, Mapping):
        inner = decode_json(value.get("tests") or value.get("test_cases"))
        if inner:
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
