"""A played reply → what verl trains on: prompt, response, mask by provenance, scores where the credit puts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from upshot.rewards.credit import Credit
from upshot.rollout.reply import Reply
from upshot.score import Reason, Score


@dataclass(frozen=True)
class Trajectory:
    """One row of verl's batch; all lists but the prompt lie beside `response_ids`."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 where the policy sampled a token that has something to learn from."""
    response_logprobs: list[float]
    token_scores: list[float]
    """The score of every span at its last token, 0 elsewhere."""
    turns: int
    metrics: dict[str, float] = field(default_factory=dict)
    """The mean of every metric over the futures, for the log; NaN where it is missing."""

    @property
    def score(self) -> float:
        """The sum of the token scores, which is what verl logs."""
        return sum(self.token_scores)


def trajectory_of(
    reply: Reply, prompt_length: int, response_length: int, metrics: Sequence[str] = ()
) -> Trajectory | Score:
    """The trajectory of a reply, or why there is none: a missing score.

    verl cuts what is too long on its own, silently and on the left; here it is missing with the reason instead.
    """
    credit, talk = reply.credit, reply.conversation
    missing = _missing(reply)
    if missing is not None or credit is None:
        return missing or reply.reward.total
    first = len(next(talk.samples()).context)
    ids = talk.ids
    if first > prompt_length:
        return Score.missing(Reason.TOO_LONG, f"a prompt of {first} ids; data.max_prompt_length is {prompt_length}")
    if len(ids) - first > response_length:
        told = f"an episode of {len(ids) - first} ids; data.max_response_length is {response_length}"
        return Score.missing(Reason.TOO_LONG, told)
    mask, scores = _by_span(credit, len(ids))
    return Trajectory(
        prompt_ids=ids[:first],
        response_ids=ids[first:],
        response_mask=mask[first:],
        response_logprobs=talk.logprobs[first:],
        token_scores=scores[first:],
        turns=len(talk.turns),
        metrics=_numbers(reply, metrics),
    )


def _missing(reply: Reply) -> Score | None:
    """Why a reply leaves the step: nothing to learn from, or a turn without a reward.

    The estimators that verl calls know a turn only as the n-th run of trained tokens. Without the first of two turns
    the second would be compared with others' first, so such a reply leaves as a whole.
    """
    if reply.credit is None or not reply.credit.trains:
        return reply.reward.total if reply.reward.total.is_missing else Score.missing(Reason.NOT_SCORED, "no credit")
    for span in reply.credit.spans:
        if span.parts and (total := reply.credit.total(span.parts)).is_missing:
            return total
    return None


def _by_span(credit: Credit, length: int) -> tuple[list[int], list[float]]:
    """Mask and scores: one score where all trained tokens earn the same parts, else one a span."""
    mask, scores = [0] * length, [0.0] * length
    trained = [span for span in credit.spans if span.parts]
    for span in trained:
        mask[span.start : span.stop] = [1] * (span.stop - span.start)
    paid = trained if len({span.parts for span in trained}) > 1 else trained[-1:]
    for span in paid:
        scores[span.stop - 1] = credit.total(span.parts).value or 0.0
    return mask, scores


def _numbers(reply: Reply, metrics: Sequence[str]) -> dict[str, float]:
    """The means of all metrics, the missing ones too: verl wants the same keys of every row."""
    means = {name: mean.value for name, mean in reply.reward.means.items()}
    found = {name: means.get(name) for name in metrics}
    return {name: float("nan") if value is None else value for name, value in found.items()}
