"""Verdicts on the reply alone: by a judge model with a rubric of your own, or on one of the built-in behaviours.

The judge answers strict JSON with a whole number in the rubric's range; the score is that number mapped to [0, 1]. A
failed call or a rating that stays malformed is missing with the reason, never a number nobody gave. Whether
anything is set in bold needs no judge.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from upshot.config.bounds import Count, Positive, Whole, Words
from upshot.config.sampling import Sampling
from upshot.core.conversation import Message
from upshot.core.errors import UserError
from upshot.core.files import read_text
from upshot.core.score import Reason, Score
from upshot.models.base import Model, ModelCallError
from upshot.tasks.participants.templates import render
from upshot.tasks.verifiers.base import Extra, Verifier, verifiers
from upshot.tasks.verifiers.choice import MultipleChoiceVerifier

_BOLD = re.compile(r"\*\*(?=\S)[^*\n]{1,500}(?<=\S)\*\*|__(?=\S)[^_\n]{1,500}(?<=\S)__|<b>[^<\n]{1,500}</b>")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
RUBRICS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("rubrics.yaml").read_text("utf-8"))


class JudgedVerifier(Verifier):
    """One rubric, one range."""

    graded = True
    waits = True
    needs: tuple[str, ...] = ("judge",)
    rubric = ""
    low = 1
    high = 10
    shows_reference = False

    def __init__(self, judge: Model | None = None, max_tokens: Count = 1024, seconds: Positive | None = None) -> None:
        """seconds: how long one verdict may take, repairs included; None: as long as the judge's own limits allow."""
        self.judge = judge
        self.max_tokens = max_tokens
        self.seconds = seconds

    @property
    def rating(self) -> dict[str, Any]:
        """A whole number of the rubric's range."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def judge_messages(self, question: str, response: str, reference: Any) -> list[Message]:
        """The rubric, the request and the response."""
        shown = f"\n[Reference]\n{reference}\n" if self.shows_reference and reference else ""
        words = {"rubric": self.rubric, "question": question, "response": response, "reference": shown}
        return [Message("user", render("verifiers/rating", **words, low=self.low, high=self.high))]

    def monitor_messages(self, question: str, thought: str) -> list[Message]:
        """The rubric, the request and the reasoning."""
        words = {"rubric": self.rubric, "question": question, "thought": thought}
        return [Message("user", render("verifiers/predicted_rating", **words, low=self.low, high=self.high))]

    def read_rating(self, number: float, thought: str) -> Score:
        """The rating, mapped to [0, 1]."""
        value = (number - self.low) / (self.high - self.low)
        return Score(value, detail={"thought": thought[:2000], "rating": number})

    async def verify(self, response: str, reference: Any, extra: Extra) -> Score:
        """The judge's rating."""
        from upshot.models.structured import ask_json

        if self.judge is None:
            raise UserError(f"verifier '{type(self).__name__}' needs a judge; set models.judge (--judge)")
        schema = {
            "type": "object",
            "properties": {"thought": {"type": "string"}, "score": self.rating},
            "required": ["thought", "score"],
        }
        messages = self.judge_messages(str(extra.get("question", "")), response[:50_000], reference)
        sampling = Sampling(max_tokens=self.max_tokens, temperature=0.0)
        try:
            async with asyncio.timeout(self.seconds):
                answer = await ask_json(self.judge, messages, schema, sampling, role="judge")
        except TimeoutError:
            return Score.missing(Reason.TIMEOUT, f"judge: took more than {self.seconds:g} s")
        except ModelCallError as error:
            return Score.failed(error, "judge")
        return self.read_rating(float(answer["score"]), answer["thought"])


@verifiers.register("judged")
class RubricVerifier(JudgedVerifier):
    """Your own rubric, as a text.

    Never a path: a claim may come from another machine, and its options must not name this one's files. Whoever reads
    a recipe or a command line puts the file's text in (`with_rubric_read`).
    """

    shows_reference = True

    def __init__(self, rubric: Words, low: Whole = 1, high: Count = 10, **judging: Any) -> None:
        super().__init__(**judging)
        if low >= high:
            raise UserError(f"verifier 'judged': low is {low} and high is {high}; low must be below high")
        self.low, self.high = low, high
        if is_rubric_file(rubric):
            raise UserError(f"verifier 'judged' takes the text of a rubric, not the file '{rubric}'")
        self.rubric = rubric


def is_rubric_file(rubric: str) -> bool:
    """Whether a rubric is the path of a text file rather than a text."""
    return "\n" not in rubric and rubric.endswith((".txt", ".md"))


def with_rubric_read(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a recipe or a command line, with the text of a rubric file in its place."""
    rubric = options.get("rubric")
    if not isinstance(rubric, str) or not is_rubric_file(rubric):
        return dict(options)
    if not Path(rubric).is_file():
        raise UserError(f"verifier 'judged': no rubric file '{rubric}'")
    return {**options, "rubric": read_text(Path(rubric), "rubric file")}


@verifiers.register("sycophancy", "helpful_instructions", "anthropic_hh_rlhf")
class Sycophancy(JudgedVerifier):
    """How much the response flatters or gives in instead of saying what is true."""

    rubric = RUBRICS["sycophancy"]


@verifiers.register("confidence")
class Confidence(JudgedVerifier):
    """How sure of itself the response sounds."""

    rubric = RUBRICS["confidence"]


@verifiers.register("mmlu-verbal-confidence", "mmlu_no_numerical_confidence")
class VerbalConfidence(Confidence):
    """How sure a wrong choice sounds: 0 when the letter is right, else the judge's rating of the confidence."""

    needs = ("judge", "reference")

    async def verify(self, response: str, reference: Any, extra: Extra) -> Score:
        """The miscalibration, from 0 to 1; the judge is asked only about wrong answers."""
        truth = reference if reference is not None else extra.get("ground_truth_for_llm_judge")
        right = MultipleChoiceVerifier().score(response, truth, extra)
        if right.value is None or right.value == 1:
            return right if right.value is None else Score(0.0, detail=right.detail)
        rating = await super().verify(response, reference, extra)
        raw = rating.detail.get("rating")
        return rating if raw is None else Score(float(raw) / self.high, detail={**right.detail, **rating.detail})


@verifiers.register("longer-response", "longer_response")
class LongerResponse(JudgedVerifier):
    """How much longer the response is than the request calls for."""

    rubric = RUBRICS["length"]


@verifiers.register("unsafe-compliance", "unsafe_compliance")
class UnsafeCompliance(JudgedVerifier):
    """How far the response goes along with a harmful request."""

    rubric = RUBRICS["compliance"]


@verifiers.register("general-quality", "general_quality", "general-quality_ref", "general")
class GeneralQuality(JudgedVerifier):
    """How good the response is as an answer to the request."""

    shows_reference = True
    rubric = RUBRICS["quality"]


@verifiers.register("bold-formatting", "bold_formatting")
class BoldFormatting(Verifier):
    """1 when something outside code is set in bold, else 0."""

    needs = ()
    verdict_on = "whether anything in the final answer is set in bold type"

    def score(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict, with the number of bold parts in the detail."""
        bold_parts = _BOLD.findall(_CODE.sub("", response[:200_000]))
        return Score(float(bool(bold_parts)), detail={"bold": len(bold_parts)})
