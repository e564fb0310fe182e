"""Grade-school math: the number in the form that the prompt asks for, compared as a number.

`####` is understood always; a box, or "the answer is …", where the prompt asks for that instead: what others prepared
comes with instructions (or examples) of its own, and a reply that heeds them is not wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

from upshot.core.score import Reason, Score
from upshot.tasks.verifiers.base import BadRow, Extra, Verifier, verifiers
from upshot.tasks.verifiers.math.answer import boxed_answer
from upshot.tasks.verifiers.numbers import last_number, parse_number, show_number

MARK = "####"
BOX = "\\boxed{}"
SENTENCE = "the answer is"
FORMS = (MARK, BOX, SENTENCE)
"""How a prompt may ask for the answer; the first of them that it mentions counts."""
REPLIES = {MARK: "#### {}", BOX: "\\boxed{{{}}}", SENTENCE: "The answer is {}."}
"""An answer in each of the forms."""
_SAID = re.compile(r"\b(?:answer is|answer:)[ \t:]*([^\n]{1,200})", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!]\s")


def asked_form(prompt: Any) -> str:
    """The form in which a prompt (a text, or messages) wants the answer; `####` where it says nothing of it."""
    messages = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, Sequence) else []
    text = "\n".join(one if isinstance(one, str) else str(one.get("content") or "") for one in messages).lower()
    return next((form for form in FORMS if form.removesuffix("{}") in text), MARK)


def answer_line(text: str, form: str = MARK) -> str | None:
    """What stands behind the last `####` on its line, or in the form that was asked for; None without one."""
    at = text.rfind(MARK)
    if at >= 0:
        return text[at + len(MARK) : at + 1000].lstrip("# \t:").split("\n", 1)[0].strip()
    if form == BOX:
        return boxed_answer(text[-8000:])
    stated = _SAID.findall(text[-8000:]) if form == SENTENCE else []
    return _SENTENCE_END.split(stated[-1])[0].strip() if stated else None


def strict_answer(text: str, form: str = MARK) -> Fraction | None:
    """The one number of the answer line; None when there is no such line or it does not hold one number."""
    line = answer_line(text, form)
    return None if line is None else parse_number(line)


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


@verifiers.register(
    "gsm8k", "openai/gsm8k", "gsm8k_main", "openai/gsm8k-main", "allenai/gsm8k", "arithmetic", "monitor_gsm8k"
)
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

    def score(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict; missing only when the reference itself is not a number."""
        truth = reference_number(reference)
        if truth is None:
            return Score.missing(Reason.BAD_ROW, "gsm8k: reference is not a number", reference=str(reference)[:200])
        form = asked_form(extra.get("prompt"))
        answer = strict_answer(response, form)
        if answer is None and self.mode == "flexible":
            answer = last_number(response)
        if answer is None:
            line = answer_line(response, form)
            fault = f"no {form} line" if line is None else f"the {form} line is not one number"
            return Score(0.0, detail={"answer": None, "fault": fault if self.mode == "strict" else "no number"})
        return Score(float(answer == truth), detail={"answer": show_number(answer)})
