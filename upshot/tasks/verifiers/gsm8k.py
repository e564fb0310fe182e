"""Grade-school math: the number after `####`, compared as a number."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

from upshot.core.score import Reason, Score
from upshot.tasks.verifiers.base import BadRow, Extra, Verifier, verifiers
from upshot.tasks.verifiers.numbers import last_number, parse_number, show_number

MARK = "####"


def answer_line(text: str) -> str | None:
    """What stands behind the last `####` on its line; None without one."""
    at = text.rfind(MARK)
    if at < 0:
        return None
    return text[at + len(MARK) : at + 1000].lstrip("# \t:").split("\n", 1)[0].strip()


def strict_answer(text: str) -> Fraction | None:
    """The one number on the last `####` line; None when there is no such line or it does not hold one number."""
    line = answer_line(text)
    return None if line is None else parse_number(line)


def flexible_answer(text: str) -> Fraction | None:
    """The number on the `####` line, else the last number of the text."""
    strict = strict_answer(text)
    return last_number(text) if strict is None else strict


def reference_number(reference: Any) -> Fraction | None:
    """The truth as a number: a number, '72', or a whole GSM8K solution that ends in '#### 72'."""
    if isinstance(reference, bool):
        return None
    if isinstance(reference, int | float):
        return parse_number(repr(reference))
    if isinstance(reference, list | tuple) and len(reference) == 1:
        return reference_number(reference[0])
    text = str(reference)
    return strict_answer(text) if MARK in text else parse_number(text)


@verifiers.register("gsm8k", "openai/gsm8k", "gsm8k_main", "openai/gsm8k-main", "allenai/gsm8k", "arithmetic")
class Gsm8kVerifier(Verifier):
    """1 when the answer is the reference as a number, else 0."""

    def __init__(self, mode: Literal["strict", "flexible"] = "strict") -> None:
        self.mode = mode

    @classmethod
    def ground_truth(cls, reference: Any, extra: Extra) -> str:
        """The bare number of a solution."""
        number = reference_number(reference)
        if number is None:
            raise BadRow("no number for an answer")
        return show_number(number)

    def quick(self, response: str, reference: Any, extra: Extra) -> Score | None:
        """Always cheap."""
        return self.score(response, reference, extra)

    def score(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict; missing only when the reference itself is no number."""
        truth = reference_number(reference)
        if truth is None:
            return Score.missing(Reason.BAD_ROW, "gsm8k: reference is not a number", reference=str(reference)[:200])
        answer = strict_answer(response) if self.mode == "strict" else flexible_answer(response)
        if answer is None:
            line = answer_line(response)
            fault = "no #### line" if line is None else "the #### line is not one number"
            return Score(0.0, detail={"answer": None, "fault": fault if self.mode == "strict" else "no number"})
        return Score(float(answer == truth), detail={"answer": show_number(answer)})
