"""A wrong solution of a contest problem to be corrected, with tests that tell right from wrong: both are judged.

A reply has tests of its own (```json {"input": […], "output": […]}```) and the corrected program. Rows bring solutions
known to be right (`correct_solutions`) and wrong (`incorrect_solutions`), on which those tests are tried.
"""

from __future__ import annotations

import re
from typing import Any

from upshot.core.score import Score
from upshot.sandbox.outcome import StdioTest
from upshot.tasks.verifiers.base import Extra, decode_json, verifiers
from upshot.tasks.verifiers.code import ContestVerifier, language_of, share_passed, stdio_pairs
from upshot.tasks.verifiers.programs import program_in

GENERATED = re.compile(r"```json\s*(.*?)```", re.DOTALL)
MOST_SOLUTIONS = 3
"""Of each kind: every one runs all tests of the reply."""


@verifiers.register("code-contests-modify-code", "code_contests_modify_code")
class ModifyCodeVerifier(ContestVerifier):
    """The verdict on the program, times the share of right solutions that pass the reply's own tests.

    So a wrong test costs, and tests that nothing right passes cost all. Without right solutions in the row the program
    alone counts. The detail has all four: the program on the row's tests and on its own, the reply's tests on right
    solutions (1 is best) and on wrong ones (0 is best).
    """

    async def verify(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict, with all four scores."""
        verdict = await super().verify(response, reference, extra)
        right, wrong = (_texts(extra.get(f"{kind}_solutions")) for kind in ("correct", "incorrect"))
        if verdict.value is None or not right:
            return verdict
        generated = GENERATED.search(response)
        pairs = stdio_pairs(decode_json(generated[1])) if generated else []
        tests, language = [StdioTest(*pair) for pair in pairs[: self.max_tests]], language_of(reference, extra)
        corrected = program_in(GENERATED.sub("", response), self.names(tests), language)
        scores = {"generated_code_pass_gt_test": verdict.value}
        for name, programs in (
            ("generated_code_pass_generated_test", [corrected] if corrected else []),
            ("generated_test_pass_correct_sol", right),
            ("generated_test_pass_incorrect_sol", wrong),
        ):
            runs = [await self.run(program, self.limits, tests, language) for program in programs] if tests else []
            passed = [share_passed(results, "code") for results in runs]
            if (fault := next((one for one in passed if one.value is None), None)) is not None:
                return fault
            scores[name] = sum(one.value == 1.0 for one in passed) / len(programs) if passed else 0.0
        value = verdict.value * scores["generated_test_pass_correct_sol"]
        return Score(value, detail={**verdict.detail, **scores, "generated_tests": len(tests)})


def _texts(value: Any) -> list[str]:
    """A few solutions of a column: a list of programs, or a mapping that has them as `solution`."""
    listed = value.get("solution") if isinstance(value, dict) else value
    return [text for text in listed or () if isinstance(text, str)][:MOST_SOLUTIONS]
