"""Mathematics with a reference answer: hendrycks MATH, MATH-hard, MATH-500, AIME and their like."""

from __future__ import annotations

from typing import Any, Literal

from upshot.core.score import Reason, Score
from upshot.tasks.verifiers.base import BadRow, Extra, Verifier, verifiers
from upshot.tasks.verifiers.math.algebra import WARM_UP, equivalent
from upshot.tasks.verifiers.math.answer import boxed_answer, final_answer
from upshot.tasks.verifiers.math.equal import quick_verdict


@verifiers.register(
    "math", "math-hard", "MATH", "hendrycks_math", "hendrycks/competition_math", "EleutherAI/hendrycks_math",
    "lighteval/MATH", "lighteval/MATH-Hard", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500",
    "math_dapo", "aime", "collabllm/collabllm-multiturn-math-hard",
)  # fmt: skip
class MathVerifier(Verifier):
    """1 when the final answer has the reference's value, else 0."""

    risky = True

    def __init__(self, mode: Literal["boxed", "flexible"] = "flexible") -> None:
        self.mode = mode

    @classmethod
    def ground_truth(cls, reference: Any, extra: Extra) -> str:
        """What a solution puts in its box; a bare answer stays as it is."""
        answer = reference_answer(reference)
        if not answer:
            raise BadRow("no reference")
        return answer

    def warm(self) -> None:
        """Import math-verify and fill its parser's tables; workers forked afterwards share them."""
        for pair in WARM_UP:
            equivalent(*pair)

    def quick(self, response: str, reference: Any, extra: Extra) -> Score | None:
        """Settled by strings and exact numbers, in microseconds."""
        truth = reference_answer(reference)
        if truth is None:
            return Score.missing(Reason.BAD_ROW, "math: no reference")
        answer = final_answer(response, boxed_only=self.mode == "boxed")
        if answer is None:
            return Score(0.0, detail={"answer": None, "fault": "no answer"})
        verdict = quick_verdict(answer, truth)
        return None if verdict is None else Score(float(verdict), detail={"answer": answer[:500]})

    def score(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict, by math-verify where it takes mathematics."""
        if (quick := self.quick(response, reference, extra)) is not None:
            return quick
        truth = reference_answer(reference) or ""
        answer = final_answer(response, boxed_only=self.mode == "boxed") or ""
        return Score(float(equivalent(answer, truth)), detail={"answer": answer[:500]})


def reference_answer(reference: Any) -> str | None:
    """The answer in a reference: bare, in a one-element list, or the box of a whole solution."""
    if isinstance(reference, list | tuple) and len(reference) == 1:
        return reference_answer(reference[0])
    if reference is None or reference == "":
        return None
    text = str(reference)
    return boxed_answer(text) if "\\boxed" in text or "\\fbox" in text else text
