"""What a verifier is: a response and a reference go in, a score (or missing, with the reason) comes out.

A verifier is found by name or by the exact data source of a row (`openai/gsm8k`). It keeps no state between items, and
is built from its name and JSON options alone, so a worker process or a remote scorer can build the same one.
`score` is the plain verdict, synchronous; `quick` may settle the easy cases without the cost or risk of `score`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from upshot.config.registry import Registry
from upshot.core.conversation import Message
from upshot.core.score import Reason, Score
from upshot.tasks.participants.templates import render

Extra = Mapping[str, Any]


class BadRow(ValueError):
    """A row of which nothing can be made or scored; the message is the reason, short and countable."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What is to be verified: plain JSON data, so that it can be checked anywhere."""

    source: str
    """Name or data source of the verifier."""
    response: str
    reference: Any
    extra: Extra = field(default_factory=dict)
    """What else the verifier may need: the question, unit tests, a rubric."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Constructor options of the verifier, such as {'mode': 'flexible'}."""


class Verifier:
    """Right or wrong, or how good. Constructor keyword arguments are its options."""

    graded: bool = False
    """Scores are grades in [0, 1] rather than 0 or 1."""
    risky: bool = False
    """Whether `score` may hang or use too much memory on hostile input; it then runs in a process of its own."""
    waits: bool = False
    """Whether it waits for a model or a sandbox; it then implements `verify` instead of `score`."""
    needs: tuple[str, ...] = ("reference",)
    """What a row must have for this verifier: 'reference', 'extra.tests' …"""
    verdict_on: str = "whether the final answer is right"
    """The question that a score of 1 answers with yes; a monitor is asked to predict it."""

    @property
    def rating(self) -> dict[str, Any]:
        """The JSON schema of the number that a monitor, or a judge, answers with."""
        return {"type": "number", "minimum": 0, "maximum": 1}

    @classmethod
    def ground_truth(cls, reference: Any, extra: Extra) -> str | None:
        """What `score` compares with, as text (as JSON if it is not text), for files that other programs read too.

        None where the verifier looks at the reply alone; `BadRow` where no reply could ever be scored.
        """
        if reference is None and "reference" in cls.needs:
            raise BadRow("no reference")
        return reference if reference is None else as_json_text(reference)

    def warm(self) -> None:
        """Import and build what is slow to start, before the first item is timed."""

    def quick(self, response: str, reference: Any, extra: Extra) -> Score | None:
        """The verdict if it is cheap and safe to compute; None leaves it to `score`."""
        return None

    def score(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict."""
        raise NotImplementedError(f"{type(self).__name__} waits for a model or sandbox: use 'await verify(…)'")

    async def verify(self, response: str, reference: Any, extra: Extra) -> Score:
        """The verdict; verifiers that wait override this."""
        return self.score(response, reference, extra)

    def metrics(self, predictions: Sequence[Score], truths: Sequence[Score]) -> dict[str, float]:
        """How well predicted scores (a monitor's, another verifier's) agree with this verifier's own."""
        return graded_metrics(predictions, truths) if self.graded else binary_metrics(predictions, truths)

    def monitor_messages(self, question: str, thought: str) -> list[Message]:
        """What to ask a monitor that sees only the question and the thought, and predicts this verifier's score."""
        scale = "a grade from 0.0 (not at all) to 1.0 (fully)" if self.graded else "1 if so, else 0"
        what = f"{self.verdict_on}: {scale}"
        prompt = render("verifiers/predicted_score", question=question, thought=thought, what=what)
        return [Message("user", prompt)]

    def read_rating(self, number: float, thought: str) -> Score:
        """The score for a number in the form of `rating`, with the thought that led to it."""
        return Score(number, detail={"thought": thought[:2000]})


def as_json_text(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def decode_json(value: Any) -> Any:
    """A value that may be JSON in a string."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(json.JSONDecodeError):
            return json.loads(value)
    return value


def valid_pairs(predictions: Sequence[Score], truths: Sequence[Score]) -> list[tuple[float, float]]:
    """(prediction, truth) where both have a value."""
    if len(predictions) != len(truths):
        raise ValueError(f"{len(predictions)} predictions for {len(truths)} truths")
    pairs = zip(predictions, truths, strict=True)
    return [(p.value, t.value) for p, t in pairs if p.value is not None and t.value is not None]


def binary_metrics(predictions: Sequence[Score], truths: Sequence[Score], threshold: float = 0.5) -> dict[str, float]:
    """Confusion counts and rates; a rate with nothing below the line is left out, because it is undefined."""
    pairs = valid_pairs(predictions, truths)
    hits = Counter((p >= threshold, t >= threshold) for p, t in pairs)
    tp, tn, fp, fn = hits[True, True], hits[False, False], hits[True, False], hits[False, True]
    out: dict[str, float] = {"tp": tp, "tn": tn, "fp": fp, "fn": fn}
    rates = {"precision": (tp, tp + fp), "recall": (tp, tp + fn), "f1": (2 * tp, 2 * tp + fp + fn)}
    rates |= {"accuracy": (tp + tn, len(pairs)), "tpr": (tp, tp + fn), "tnr": (tn, tn + fp)}
    out |= {name: above / below for name, (above, below) in rates.items() if below}
    if "tpr" in out and "tnr" in out:
        out["gmean2"] = out["tpr"] * out["tnr"]  # 0 for who always says the same, whatever the share of right answers
    return out | {"valid": len(pairs), "missing": len(predictions) - len(pairs)}


def graded_metrics(predictions: Sequence[Score], truths: Sequence[Score]) -> dict[str, float]:
    """Errors, means and Pearson's correlation (left out when either side is constant)."""
    pairs = valid_pairs(predictions, truths)
    out: dict[str, float] = {"valid": len(pairs), "missing": len(predictions) - len(pairs)}
    if not pairs:
        return out
    n = len(pairs)
    mse = sum((p - t) ** 2 for p, t in pairs) / n
    mean_p, mean_t = sum(p for p, _ in pairs) / n, sum(t for _, t in pairs) / n
    out |= {"mse": mse, "rmse": math.sqrt(mse), "mean_prediction": mean_p, "mean_truth": mean_t}
    var_p = sum((p - mean_p) ** 2 for p, _ in pairs)
    var_t = sum((t - mean_t) ** 2 for _, t in pairs)
    if var_p > 0 and var_t > 0:
        cov = sum((p - mean_p) * (t - mean_t) for p, t in pairs)
        out["correlation"] = cov / math.sqrt(var_p * var_t)
    return out


verifiers: Registry[Verifier] = Registry(
    "verifier",
    "upshot.tasks.verifiers",
    "upshot.tasks.verifiers.math",
    "upshot.tasks.verifiers.ifeval",
    "upshot.tasks.environments",
    base=Verifier,
)
"""Verifiers by name and by exact data source."""


async def verify_claim(claim: Claim | None) -> Score:
    """The score of a claim, found in this process; missing where there is none."""
    if claim is None:
        return Score.missing(Reason.NOTHING_SAID, "no reply to verify")
    verifier = verifiers.create(claim.source, claim.options, where="the row's source")
    return await verifier.verify(claim.response, claim.reference, claim.extra)
