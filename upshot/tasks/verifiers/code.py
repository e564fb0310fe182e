"""Programs against tests, through the sandbox: asserts, stdin/stdout, and the shapes of the public sets.

A test that the sandbox itself failed to run is missing, not failed. A test that can tell nothing of any program does
not count; without a valid one the score is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from upshot.config.bounds import Count, Positive
from upshot.core.errors import UserError
from upshot.core.score import Reason, Score
from upshot.tasks.verifiers.base import BadRow, Extra, Verifier, as_json_text, verifiers

MAX_TESTS = 200
TEST_COLUMNS = (
    *("test_list", "tests", "assert_case", "test_imports", "test_setup_code", "challenge_test_list"),
    *("public_tests", "private_tests", "generated_tests", "input_output", "inputs", "outputs", "test_cases"),
)
"""Columns that tests are read from; the ground truth of a prepared row holds what they say."""
_LANGUAGE = re.compile(r"[ \t]*([\w+-]*)")
_CODE = re.compile(r"^(?:def |class |import |from \w+ import |print\(|for .*:|while .*:|\w+ ?= ?)", re.MULTILINE)


def program_in(text: str) -> str | None:
    """The program of a response: its last Python (or unnamed) block, else the whole when it looks like code."""
    text = text[-200_000:]
    blocks = list(_blocks(text))
    for wanted in (("python", "py", "python3"), ("",)):
        named = [body for language, body in blocks if language.lower() in wanted and body.strip()]
        if named:
            return str(named[-1])
    if not blocks and _CODE.search(text):
        return text
    return None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, body) of every fenced block; the last one may be unclosed."""
    start = text.find("```")
    while start >= 0:
        line = text.find("\n", start)
        if line < 0:
            return
        end = text.find("```", line)
        language = _LANGUAGE.match(text, start + 3, line)
        yield language[1] if language else "", text[line + 1 :] if end < 0 else text[line + 1 : end]
        start = text.find("```", end + 3) if end >= 0 else -1


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
        program = program_in(response)
        if program is None:
            return Score(0.0, detail={"fault": "no program in the response", "tests": len(tests)})
        share = share_passed(await self.run(self.program(program, extra), tests), "code")
        return share if self.partial or share.value is None else Score(float(share.value == 1), detail=share.detail)

    def program(self, program: str, extra: Extra) -> str:
        """What is run; shapes that complete a given beginning put it in front."""
        return program

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

    async def run(self, program: str, tests: Sequence[Any]) -> list[Any]:
        """Results of assert-like tests."""
        return list(await self.sandbox.test_program(program, tests, self._limits()))

    def _limits(self) -> Any:
        from upshot.sandbox.limits import Limits

        return Limits(cpu_seconds=self.cpu_seconds)


def share_passed(results: Sequence[Any], who: str) -> Score:
    """The share of the valid tests that passed; missing where the sandbox failed or no test can tell anything."""
    outcomes = [str(result.outcome) for result in results]
    if "sandbox_fault" in outcomes:
        return Score.missing(Reason.SANDBOX_FAULT, f"{who}: sandbox_fault", outcomes=outcomes[:50])
    values = [result.value for result in results if result.value is not None]
    if not values:
        why = f"{who}: no valid test: {results[0].detail[:300]}"
        return Score.missing(Reason.BAD_ROW, why, outcomes=outcomes[:50])
    detail = {
        "passed": int(sum(values)),
        "tests": len(values),
        "outcomes": outcomes[:50],
        "first_failure": next((result.detail for result in results if result.value == 0), "")[:500],
    }
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
    """A program that reads stdin and writes stdout: [{input, output}], or {inputs, outputs}."""

    @classmethod
    def ground_truth(cls, reference: Any, extra: Extra) -> str:
        """The inputs with their outputs."""
        pairs = [{"input": test.input, "output": test.output} for test in cls.some_tests(reference, extra)]
        return as_json_text(pairs)

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """The input/output pairs."""
        from upshot.sandbox.outcome import StdioTest

        return [StdioTest(given, wanted) for given, wanted in stdio_pairs(decode_json(reference) or extra)]

    async def run(self, program: str, tests: Sequence[Any]) -> list[Any]:
        """Results of stdin/stdout tests."""
        return list(await self.sandbox.test_stdio(program, tests, self._limits()))


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

    async def verify(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict; missing for a problem whose solutions are in another language."""
        language = str(extra.get("language") or "python").lower()
        if not language.startswith("py"):
            return Score.missing(Reason.BAD_ROW, f"code: the row wants {language}, and only Python is run")
        return await super().verify(response, reference, extra)

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """Tests of all the columns there are."""
        from upshot.sandbox.outcome import StdioTest

        found: list[tuple[str, str]] = []
        row = {**extra, **(decode_json(reference) if isinstance(decode_json(reference), Mapping) else {})}
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
            helpers = stub.split(f"def {entry}")[0] if entry and stub else ""
            return f"{helpers}\n{program}"
        return stub + program

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
        stub = str(extra.get("code_prompt") or "")
        return f"{stub.split('def ')[0]}\n{program}" if stub else program

    def tests(self, reference: Any, extra: Extra) -> list[Any]:
        """A test for each method."""
        from upshot.sandbox.inside.cases import each_method

        test = str(extra.get("test") or reference or "")
        return list(each_method(test)) if "TestCase" in test else []


def decode_json(value: Any) -> Any:
    """A value that may be JSON in a string."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


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
