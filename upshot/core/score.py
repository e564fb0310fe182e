"""A score is a number, or missing with a reason. Missing is not zero.

Reasons are a small closed set, because they are counted and become names of metrics (`missing/timeout`). Further
information for the reader (whose call it was, the text of the exception) is in the score's detail, under `why`.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from traceback import walk_tb
from typing import Any

from upshot.core.errors import UserError, user_error_in

_OURS = f"{Path(__file__).parents[1]}/"
_LIBRARIES = ("/site-packages/", f"/lib/python{sys.version_info.major}.{sys.version_info.minor}/")
"""Folders whose code is not the user's."""
LARGEST = 1e30
"""Scores beyond it are refused: float32, in which the policy learns, could not hold their sums and products."""
WHY_CHARACTERS = 300
"""Longest text of an exception that is kept in the detail."""


class Cause(StrEnum):
    """Who can bring a reason about (docs/why/missing.md has the table)."""

    MACHINE = "machine"
    """An endpoint, the engine or the sandbox: it does not depend on what the policy says."""
    ROW = "row"
    """The data: every reply to the row is missing in the same way."""
    POLICY = "policy"
    """Also the policy, by what it says or how long it is; `rollout/blame.py` decides for each case."""


class Reason(StrEnum):
    """Why there is no score."""

    TIMEOUT = "timeout"
    """A call took longer than its limit."""
    TOO_LONG = "too_long"
    """A prompt without room in the model's context, or a claim beyond its limit."""
    RATE_LIMITED = "rate_limited"
    CONNECTION = "connection"
    UNAVAILABLE = "unavailable"
    """A service that answers, but is overloaded or down (502, 503, 504, 529)."""
    HTTP_ERROR = "http_error"
    """Any other status of a failed request: the service may dislike this request alone."""
    BAD_RESPONSE = "bad_response"
    """A service answered with something unusable."""
    REFUSED = "refused"
    """The provider's filter."""
    CLOSED = "closed"
    """The model was closed during the call."""
    ENGINE_ERROR = "engine_error"
    BAD_JSON = "bad_json"
    TRUNCATED = "truncated"
    """A helper's answer was cut at its token limit."""
    BAD_ANSWER = "bad_answer"
    """A helper's answer lacks a key or a valid rating; or a reply lacks the statement that is scored."""
    ERROR = "error"
    """The code of a metric, verifier, user or environment raised."""
    NOT_A_SCORE = "not_a_score"
    """It returned something that is not a number."""
    CRASHED = "crashed"
    """A worker process died or ran out of memory, an agent's program failed, a server was lost during a call."""
    SANDBOX_FAULT = "sandbox_fault"
    UNDECIDED = "undecided"
    """The response does not show enough to settle the verdict."""
    BAD_ROW = "bad_row"
    """The row lacks what scoring needs: a reference, tests, a label."""
    NOTHING_SAID = "nothing_said"
    OVERLONG = "overlong"
    """A reply cut at the token limit, under the rule 'missing'."""
    MALFORMED = "malformed"
    """An empty reply, under the rule 'missing'."""
    USER_RULES = "user_rules"
    """The simulated user broke a rule: it called a tool that is not its own, or never stopped calling."""
    NO_THOUGHT = "no_thought"
    """A reply without a thought that could be handed on."""
    NOT_SCORED = "not_scored"
    """It was not scored."""
    OTHER = "other"
    """The user's own words, kept in the detail."""

    @classmethod
    def read(cls, text: object, default: Reason | None = None) -> Reason:
        """The reason for a word of a model, service or exception; `default` (OTHER) for unknown words."""
        word = str(text).removeprefix("user ")
        if word in _SAME:
            return _SAME[word]
        if re.fullmatch(r"http_\d{3}", word):
            return cls.UNAVAILABLE if word.removeprefix("http_") in _OVERLOADED else cls.HTTP_ERROR
        return cls(word) if word in cls._value2member_map_ else default or cls.OTHER

    @property
    def cause(self) -> Cause:
        """Who can cause it: the machine, the row, or in all other cases the policy."""
        if self in _BY_MACHINE:
            return Cause.MACHINE
        return Cause.ROW if self is Reason.BAD_ROW else Cause.POLICY


_BY_MACHINE = {Reason.RATE_LIMITED, Reason.CONNECTION, Reason.UNAVAILABLE, Reason.CLOSED}
_BY_MACHINE |= {Reason.ENGINE_ERROR, Reason.SANDBOX_FAULT}
_OVERLOADED = ("502", "503", "504", "529")

_SAME = {
    "aborted": Reason.CLOSED,
    **dict.fromkeys(("empty", "missing_key", "not_a_number", "not_text", "out_of_range"), Reason.BAD_ANSWER),
}
"""Words of `ModelCallError` that count as one reason."""


@dataclass(frozen=True, slots=True)
class Score:
    """A value, or the reason why there is none."""

    value: float | None
    reason: Reason | None = None
    """Why the value is missing."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """What a reader of the transcript wants to see: the judge's thought, the extracted answer, failed tests, `why`."""

    def __post_init__(self) -> None:
        if self.value is None:
            if not self.reason:
                raise ValueError("a missing score needs its reason")
            reason = Reason.read(self.reason)
            if reason != self.reason:  # a user's own word counts as one of the closed set, and stays in the detail
                object.__setattr__(self, "detail", {"why": str(self.reason), **self.detail})
            object.__setattr__(self, "reason", reason)
            return
        value = float(self.value)  # numpy's numbers and bools become plain ones
        if not math.isfinite(value):
            raise ValueError(f"a score must be finite, not {value}; use Score.missing(reason)")
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "reason", None)

    @classmethod
    def missing(cls, reason: Reason | str, why: str = "", **detail: Any) -> Score:
        """A missing score: a reason to count, and an explanation for the reader."""
        return cls(None, reason, {"why": why, **detail} if why else detail)  # type: ignore[arg-type]

    @classmethod
    def failed(cls, error: BaseException, who: str, **detail: Any) -> Score:
        """Missing, because `who` raised; an exception with a `reason` (a model's, a time limit) is counted under that
        reason."""
        reason = Reason.read(getattr(error, "reason", ""), Reason.ERROR)
        text = _first_line(error)
        text = text if reason is not Reason.ERROR and text else _with_type(error)
        place = place_of(error) if reason is Reason.ERROR else ""
        return cls.missing(reason, f"{who}: {text}"[: WHY_CHARACTERS - len(place)] + place, **detail)

    @classmethod
    def of(cls, result: object, who: str) -> Score:
        """The score that user code returned, a `Score` or a plain number; missing if it is neither."""
        if isinstance(result, Score) and abs(result.value or 0.0) <= LARGEST:
            return result
        returned = result.value if isinstance(result, Score) else result
        value = read_number(returned)
        if value is not None:
            return cls(value)
        needed = f"a Score or a number within ±{LARGEST:g}"
        return cls.missing(Reason.NOT_A_SCORE, f"{who} returned {show(returned)}; it should return {needed}")

    @property
    def is_missing(self) -> bool:
        """Whether there is no value."""
        return self.value is None

    @property
    def why(self) -> str:
        """The explanation beyond the reason, or ''."""
        return str(self.detail.get("why", ""))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Score:
        """Read what `to_dict` wrote."""
        return cls(data.get("value"), data.get("missing"), data.get("detail") or {})

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the value, or the reason it is missing."""
        out: dict[str, Any] = {"value": self.value} if self.value is not None else {"missing": self.reason}
        if self.detail:
            out["detail"] = dict(self.detail)
        return out


LASTING = {Reason.BAD_ROW, Reason.TOO_LONG, Reason.NOTHING_SAID, Reason.OVERLONG, Reason.MALFORMED}
LASTING |= {Reason.NOT_SCORED, Reason.UNDECIDED}
"""Reasons for which another attempt would fail in the same way."""


def mean_score(scores: Iterable[Score], nothing: str = "no scores") -> Score:
    """The mean of the present scores; missing, with the most frequent reason, if there are none."""
    scores = list(scores)
    values = [s.value for s in scores if s.value is not None]
    if values:
        return Score(sum(values) / len(values))
    if not scores:
        return Score.missing(Reason.NOT_SCORED, nothing)
    reasons = [str(s.reason) for s in scores]
    commonest = max(sorted(set(reasons)), key=reasons.count)
    return Score.missing(commonest, next(s for s in scores if s.reason == commonest).why)


def describe_missing(scores: Iterable[Score]) -> list[str]:
    """How often each reason occurred, the most frequent first, with one example: '3 x bad_row: bleu: no …'."""
    absent = [score for score in scores if score.is_missing]
    counts = Counter(str(score.reason) for score in absent)
    example = {str(score.reason): score.why for score in reversed(absent)}
    return [f"{count} x {reason}: {example[reason]}".removesuffix(": ") for reason, count in counts.most_common()]


def read_number(value: object) -> float | None:
    """The number that user code returned, of any library; None if it is not one within ±`LARGEST`."""
    if hasattr(type(value), "__float__"):  # numbers of any library have it, texts do not
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(value)  # type: ignore[arg-type]
            return number if abs(number) <= LARGEST else None
    return None


def show(value: object) -> str:
    """What user code returned, for a message: only its type unless it is plain, since its repr may be slow or hang."""
    plain = value is None or isinstance(value, str | int | float)
    return f"{value!r:.80} ({type(value).__name__})" if plain else f"a {type(value).__name__}"


def place_of(error: BaseException) -> str:
    """Where the user's own code raised, as ' (rules.py, line 12)': its innermost frame; '' if none is theirs."""
    place = ""
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.endswith(".py") and not file.startswith(_OURS) and not any(part in file for part in _LIBRARIES):
            place = f" ({Path(file).name}, line {line})"
    return place


@contextmanager
def naming_errors(code: str) -> Iterator[None]:
    """Inside, an exception of the user's own code becomes a `UserError` that says what and where it raised."""
    try:
        yield
    except (Exception, SystemExit) as error:
        place = place_of(error)
        if not place or user_error_in(error):
            raise
        raise UserError(f"{code} raised {_with_type(error)}{place}") from error


def _with_type(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}".removesuffix(": ")


def _first_line(error: BaseException) -> str:
    """An exception's message; a user's own class may raise even in `str`."""
    with suppress(Exception):
        return next(iter(str(error).splitlines()), "")
    return ""
