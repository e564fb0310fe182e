"""Short answers compared as text: exactly, as part of the response, or by the overlap of words."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any, Literal

from upshot.core.score import Reason, Score
from upshot.tasks.verifiers.base import Extra, Verifier, verifiers
from upshot.tasks.verifiers.math.answer import boxed_answer

_TAG = re.compile(r"<answer>(.{0,2000}?)</answer>", re.DOTALL | re.IGNORECASE)
_SAID = re.compile(r"(?:final answer|answer)\s*(?:is|:)\s*:?\s*(.{1,500}?)(?:\n|$)", re.IGNORECASE)


def normal_text(text: str) -> str:
    """Lower case without punctuation, articles and extra spaces, as SQuAD compares."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation + "“”‘’"))
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def short_answer(text: str) -> str:
    """The answer in a response: <answer> tags, a box, 'answer: …', else the whole of it."""
    text = text[-50_000:]
    if tagged := _TAG.findall(text):
        return str(tagged[-1])
    if (boxed := boxed_answer(text)) is not None:
        return boxed
    stated = _SAID.findall(text)
    return str(stated[-1]) if stated else text


def word_f1(answer: str, truth: str) -> float:
    """F1 of the words two texts share."""
    first, second = Counter(normal_text(answer).split()), Counter(normal_text(truth).split())
    shared = sum((first & second).values())
    return 2 * shared / (first.total() + second.total()) if shared else 0.0


@verifiers.register(
    "exact-match", "search-qa", "hotpotqa", "monitor_hotpotqa", "nq", "monitor_natural_questions", "triviaqa", "popqa"
)
class ExactMatchVerifier(Verifier):
    """1 when the answer is one of the references; `contains` looks inside the answer, `f1` grades the overlap."""

    def __init__(self, mode: Literal["exact", "contains", "f1"] = "exact", boxed: bool = False) -> None:
        """boxed: only what stands in a \\boxed{} is an answer."""
        self.mode = mode
        self.boxed = boxed
        self.graded = mode == "f1"

    def score(self, response: str, reference: Any, extra: Extra) -> Score:
        """The best score over the references."""
        truths = references_of(reference)
        if not truths:
            return Score.missing(Reason.BAD_ROW, "exact-match: no reference")
        answer = _unwrap(boxed_answer(response[-50_000:]) or "") if self.boxed else short_answer(response)
        if self.boxed and not answer.strip():
            return Score(0.0, detail={"fault": "no \\boxed answer"})
        return Score(max(self._one(answer, truth) for truth in truths), detail={"answer": answer[:500]})

    def _one(self, answer: str, truth: str) -> float:
        if self.mode == "f1":
            return word_f1(answer, truth)
        stated, wanted = normal_text(answer), normal_text(truth)
        if not wanted:  # nothing but punctuation: compared as it is
            return float(answer.strip() == truth.strip())
        return float(stated == wanted if self.mode == "exact" else f" {wanted} " in f" {stated} ")


def _unwrap(answer: str) -> str:
    """An answer without the LaTeX that only sets it as text; dashes and underscores part words, as published."""
    return re.sub(r"[‐-―−_]", " ", re.sub(r"\\text\w*\{([^{}]*)\}", r"\1", answer))


def references_of(reference: Any) -> list[str]:
    """The accepted answers: one text, or a list of them (also under 'target' or 'aliases')."""
    if isinstance(reference, dict):
        reference = reference.get("target", reference.get("aliases", reference.get("value")))
    accepted = reference if isinstance(reference, list | tuple) else [reference]
    return [str(item) for item in accepted if item is not None]
