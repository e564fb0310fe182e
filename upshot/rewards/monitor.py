"""The monitor of thoughts: a model reads question and thought only, and predicts what the verifier made of the reply.

How well it predicts says how readable the thoughts are. It asks as judges do: temperature 0, strict JSON, an answer
that cannot be used is asked for again, then missing with its reason. A reply without a thought, or without a verdict to
compare with, is not shown to it. All of these are counted and leave the numbers: none is a zero.

Covers the asking and the counting. Where replies come from: `training/loops/evaluate.py`, `offline/monitor.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, Turn
from upshot.core.errors import UserError
from upshot.core.event_loop import gather
from upshot.core.score import Reason, Score
from upshot.core.time_limit import limit_call_now
from upshot.models.base import Model
from upshot.models.structured import ask_json
from upshot.rewards.credit import Reward
from upshot.rewards.workers.base import Manager
from upshot.tasks.base import Task
from upshot.tasks.participants.ask import object_schema
from upshot.tasks.participants.templates import as_lines
from upshot.tasks.verifiers.base import Claim, Verifier, binary_metrics, graded_metrics, verifiers

METRIC = "verifier"
"""The metric of a recipe whose score a monitor predicts."""
VIEWS = {
    "thought": "{thought}",
    "question": "(not shown to you: predict from the question alone)",
    "answer": "(not shown to you; predict from the answer that was given instead)\n{answer}",
}
"""What a monitor is shown in the place of the reasoning: the thought itself, or a baseline without it."""


class AnyVerdict(Verifier):
    """Stands in for a verifier that is not registered: the verdict is asked for as a grade, and measured both ways."""

    graded = True
    verdict_on = "how good the final answer is"

    def metrics(self, predictions: Sequence[Score], truths: Sequence[Score]) -> dict[str, float]:
        """Yes or no from 0.5 on, and errors of the grades."""
        return binary_metrics(predictions, truths) | graded_metrics(predictions, truths)


@dataclass(frozen=True, slots=True)
class MonitorCase:
    """A reply as the monitor gets it, and the verdict that it does not get."""

    question: Sequence[Message]
    """How the conversation opened."""
    thought: str
    """What was thought in it; '' when nothing was."""
    verdict: Score
    verifier: Verifier
    task: str = ""
    """Numbers are also given by this label."""
    answer: str = ""
    """What was said after the thought; shown in the view 'answer' alone."""
    view: str = "thought"
    """One of `VIEWS`. Replies without a thought are left out of all of them, so that views compare."""


@dataclass(frozen=True, slots=True)
class MonitorPrediction:
    """A case and what the monitor predicted."""

    case: MonitorCase
    prediction: Score

    @property
    def invalid(self) -> str:
        """Why the pair does not count: no_thought, no_verdict or no_prediction; '' when it does."""
        if not self.case.thought.strip():
            return "no_thought"
        if self.case.verdict.is_missing:
            return "no_verdict"
        return "no_prediction" if self.prediction.is_missing else ""


class Monitor:
    """One model that looks at thoughts."""

    def __init__(self, model: Model, max_tokens: int = 1024, repairs: int = 2) -> None:
        self.model = model
        self.sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        self.repairs = repairs

    async def look(self, case: MonitorCase) -> MonitorPrediction:
        """The predicted verdict; missing where there is nothing to predict from or to compare with."""
        if not case.thought.strip():
            return MonitorPrediction(case, Score.missing(Reason.NO_THOUGHT))
        if case.verdict.is_missing:
            return MonitorPrediction(case, Score.missing(Reason.NOT_SCORED, "no verdict to compare with"))
        verifier, opening = case.verifier, [message for message in case.question if message.role != "system"]
        question = opening[0].content if len(opening) == 1 else as_lines(opening)
        shown = VIEWS[case.view].replace("{thought}", case.thought.strip()).replace("{answer}", case.answer.strip())
        schema = object_schema({"thought": {"type": "string"}, "score": verifier.rating})
        try:
            messages = verifier.monitor_messages(question, shown)
            answer = await ask_json(self.model, messages, schema, self.sampling, "monitor", self.repairs)
            rating = verifier.read_rating(float(answer["score"]), answer["thought"])
            return MonitorPrediction(case, Score.of(rating, "the verifier's read_rating"))
        except UserError:  # an empty budget, for one, ends the whole
            raise
        except Exception as error:
            return MonitorPrediction(case, Score.failed(error, "monitor"))

    async def look_at_all(self, cases: Iterable[MonitorCase]) -> list[MonitorPrediction]:
        """All at once; the model's own limits bound what is under way."""
        return await gather(map(self.look, cases))


def thoughts(turns: Iterable[Turn]) -> str:
    """What the policy thought in its turns, in their order; '' when it never did."""
    noted = (turn.note.get("thought") for turn in turns if turn.message.role == "assistant")
    return "\n\n".join(text for text in noted if isinstance(text, str) and text.strip())


def case_of(
    conversation: Conversation, reward: Reward, task: Task | None, manager: Manager, label: str = ""
) -> MonitorCase:
    """A scored conversation as a case: the row's opening, the thoughts of its episode, the verifier's score."""
    row = conversation.row
    claim = claim_of(task, conversation) if task is not None else Claim(row.source or label, "", None)
    verdict = reward.means.get(METRIC)
    if verdict is None:  # a rule decided the reward, or the episode failed
        total = reward.total
        verdict = total if total.is_missing else Score.missing(Reason.NOT_SCORED, "the verifier was not asked")
    turns, last = conversation.turns[len(row.messages) :], conversation.last("assistant")
    answer = last.content if last is not None else ""
    return MonitorCase(row.messages, thoughts(turns), verdict, find_verifier(claim, manager), label, answer)


def claim_of(task: Task, conversation: Conversation) -> Claim | None:
    """What the task would have verified; None where it does not say."""
    try:
        return limit_call_now(task, task.claim, conversation)
    except UserError:
        raise
    except Exception:  # its verdict is missing for the same reason
        return None


def find_verifier(claim: Claim | None, manager: Manager) -> Verifier:
    """The verifier of a claim; `AnyVerdict` where there is none that is known here."""
    known = claim is not None and (claim.source in verifiers or ":" in claim.source)
    return manager.verifier(claim) if claim is not None and known else AnyVerdict()


def measure(looks: Sequence[MonitorPrediction]) -> dict[str, float]:
    """How well verdicts were predicted, over all looks and under 'TASK/' for each task."""
    out = agreement(looks)
    for task, of_task in by_task(looks).items():
        if task:
            out |= {f"{task}/{name}": value for name, value in agreement(of_task).items()}
    return out


def by_task(looks: Iterable[MonitorPrediction]) -> dict[str, list[MonitorPrediction]]:
    """Looks by their task, in the order in which the tasks first occur."""
    out: dict[str, list[MonitorPrediction]] = {}
    for look in looks:
        out.setdefault(look.case.task, []).append(look)
    return out


def agreement(looks: Sequence[MonitorPrediction]) -> dict[str, float]:
    """The verifier's metrics over the valid pairs, and how many are invalid, by kind and by the monitor's failures."""
    out = _metrics(looks)
    kinds = Counter(look.invalid for look in looks)
    out |= {name: float(kinds[name]) for name in ("no_thought", "no_verdict", "no_prediction")}
    failed = Counter(str(look.prediction.reason) for look in looks if look.invalid == "no_prediction")
    return out | {f"missing/{reason}": float(count) for reason, count in sorted(failed.items())}


def _metrics(looks: Sequence[MonitorPrediction]) -> dict[str, float]:
    """By the verifier where there is one; yes-or-no verdicts and grades apart where several kinds are mixed."""
    if len({(type(look.case.verifier), look.case.verifier.graded) for look in looks}) == 1:
        return looks[0].case.verifier.metrics(*_pairs(looks))
    counts: Counter[str] = Counter(valid=0, missing=0)
    out: dict[str, float] = {}
    for graded in dict.fromkeys(look.case.verifier.graded for look in looks):
        alike = [look for look in looks if look.case.verifier.graded == graded]
        numbers = (graded_metrics if graded else binary_metrics)(*_pairs(alike))
        counts.update({name: int(numbers.pop(name)) for name in ("valid", "missing")})
        out |= numbers
    return out | {name: float(count) for name, count in counts.items()}


def _pairs(looks: Sequence[MonitorPrediction]) -> tuple[list[Score], list[Score]]:
    return [look.prediction for look in looks], [look.case.verdict for look in looks]
