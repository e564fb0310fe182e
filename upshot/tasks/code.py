"""Programming: asserts, stdin/stdout, contests, and the shapes of HumanEval, MBPP, BigCodeBench and ClassEval."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from upshot.config.bounds import Count, Positive
from upshot.core.conversation import Row
from upshot.core.errors import UserError
from upshot.tasks.base import tasks
from upshot.tasks.datasets.records import row_of
from upshot.tasks.verified import VerifiedTask
from upshot.tasks.verifiers.code import language_of
from upshot.tasks.verifiers.programs import program_in


class CodeTask(VerifiedTask):
    """Problems whose reply is a program: in Python, or in the language that a row names."""

    instructions = "Write the program in Python, in one ```python code block."
    question = ""
    """The column of a published set that holds the question, where it is one of its own; the tests are in `test`."""
    shows_code = False
    """Whether that question is code to complete."""

    def __init__(self, partial: bool = False, cpu_seconds: Positive = 6.0, max_tests: Count = 50, **rows: Any) -> None:
        """partial: reward the share of passed tests instead of all or nothing."""
        super().__init__(**rows)
        self.verifier_options = {"partial": partial, "cpu_seconds": cpu_seconds, "max_tests": max_tests}

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row; one that names another language than Python is asked in that one."""
        if isinstance(text := record.get(self.question), str):
            shown = f"```python\n{text.rstrip()}\n```" if self.shows_code else text
            record = {**record, "prompt": shown, "ground_truth": record.get("test")}
        language = language_of(None, record)
        if language == "python" or self.instructions != CodeTask.instructions:
            return super().parse(record)
        wanted = f"Write the program in {language}, in one ```{language} code block."
        return row_of(record, self.verifier, wanted, self.system)

    def format_error(self, text: str) -> str:
        """No program."""
        return "" if "```" in text or program_in(text) is not None else "no program"


@tasks.register("code", "mbpp")
class Code(CodeTask):
    """Functions checked by asserts (MBPP, AceCode); the first assert is shown if the row is plain text."""

    verifier = "code"
    hub = "google-research-datasets/mbpp@sanitized"

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row; the first test tells the function's name."""
        tests = record.get("test_list") or []
        if len(tests) and not record.get("messages") and not record.get("data_source"):
            question = record.get("prompt") or record.get("text") or record.get("question")
            record = {**record, "prompt": f"{question}\nYour code should pass this test: {tests[0]}"}
            return row_of({**record, "ground_truth": list(tests)}, self.verifier, self.instructions, self.system)
        return super().parse(record)


@tasks.register("code-stdio")
class CodeStdio(CodeTask):
    """Programs that read stdin and write stdout."""

    verifier = "code-stdio"


@tasks.register("code-contests")
class CodeContests(CodeTask):
    """Contest problems with public, private and generated tests."""

    verifier = "code-contests"
    hub = "deepmind/code_contests"

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row; the description is the question."""
        if isinstance(record.get("description"), str) and not record.get("prompt"):
            record = {**record, "prompt": record["description"]}
        return super().parse(record)


@tasks.register("humaneval")
class HumanEval(CodeTask):
    """Functions to complete."""

    verifier = "humaneval"
    hub = "openai/openai_humaneval"
    instructions = "Complete the function. Answer with the whole function in one ```python code block."
    question = "prompt"
    shows_code = True

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row; the prompt is the stub of the function."""
        stub = record.get("prompt")
        return super().parse({**record, "stub": stub} if isinstance(stub, str) else record)


@tasks.register("leetcode")
class LeetCode(CodeTask):
    """Methods of a class `Solution`, checked by `check(Solution().method)`."""

    verifier = "humaneval"
    hub = "newfacade/LeetCodeDataset"

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row; the set's own `prompt` is what a program begins with, its `query` the question."""
        if isinstance(record.get("query"), str) and isinstance(record.get("prompt"), str):
            begins = {"stub": f"{record['prompt'].rstrip()}\n\n", "prompt": record["query"]}
            record = {**record, **begins, "ground_truth": record.get("test")}
        return super().parse(record)


@tasks.register("bigcodebench-instruct")
class SingleTurnBigCodeBench(CodeTask):
    """BigCodeBench in one turn; in conversation it is the CollabLLM task `bigcodebench`."""

    verifier = "bigcodebench"
    hub = "bigcode/bigcodebench"
    question = "instruct_prompt"


@tasks.register("classeval")
class ClassEval(CodeTask):
    """Classes to write, checked by unittest classes."""

    verifier = "classeval"
    hub = "FudanSELab/ClassEval"
    hub_splits = ("test",)
    instructions = "Complete the class. Answer with the whole class in one ```python code block."
    question = "skeleton"
    shows_code = True


@tasks.register("impossible-livecodebench")
class ImpossibleLiveCodeBench(CodeTask):
    """Problems whose tests contradict them: the score is whether the program passes those tests."""

    verifier = "impossible-livecodebench"
    hub = "fjzzq2002/impossible_livecodebench"
    hub_splits = ("conflicting", "oneoff")

    def parse(self, record: Mapping[str, Any]) -> Row:
        """A record as a row; of its tests only those that the original has not got are run."""
        verdict = record.get("reward_model")
        source = verdict if isinstance(verdict, Mapping) else record
        test = str(source.get("ground_truth") or source.get("test") or "")
        if source.get("original_test"):
            test = wrong_asserts(test, str(source["original_test"]))
        if not test:
            raise UserError("no test contradicts the problem's own ('test' beside 'original_test')")
        entry = str(source.get("entry_point") or "").removeprefix("check(").removesuffix(")")
        kept = {key: value for key, value in record.items() if key not in ("reward_model", "original_test")}
        row = super().parse({**kept, "test": test, "entry_point": entry, "ground_truth": test})
        return replace(row, source=self.verifier)


def wrong_asserts(test: str, original: str) -> str:
    """A check function of the asserts that the original tests have not got; empty where there are none."""
    try:
        known = {ast.dump(node) for node in ast.walk(ast.parse(original)) if isinstance(node, ast.Assert)}
        asserts = [node for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Assert)]
    except (SyntaxError, ValueError, RecursionError):
        return ""
    wrong = [f"    {ast.unparse(node)}" for node in asserts if ast.dump(node) not in known]
    return "\n".join(["def check(candidate):", *wrong]) if wrong else ""
