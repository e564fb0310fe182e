"""A played reply → the rows that verl trains on: prompt, response, mask by provenance.

The reply itself travels with them, whole: what its tokens earned is settled where all replies of the step are
(`train_batch.py`). A reply with nothing to learn from has one row without a trained token, so that it is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upshot.core.score import Reason, Score
from upshot.rewards.reward import Reward
from upshot.rollout.rollout import Rollout


@dataclass(frozen=True)
class Trajectory:
    """One row of verl's batch; all lists but the prompt lie beside `response_ids`."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 where the policy sampled a token that has something to learn from."""
    response_logprobs: list[float]

    @property
    def trains(self) -> bool:
        """Whether any of its tokens is trained."""
        return any(self.response_mask)


def refuse_long(reply: Rollout, prompt_length: int, response_length: int) -> None:
    """Make a reply missing whose prompt or episode verl would cut on its own, silently and on the left."""
    ids = reply.conversation.ids
    first = _first(reply)
    why = ""
    if first > prompt_length:
        why = f"a prompt of {first} ids; data.max_prompt_length is {prompt_length}"
    elif len(ids) - first > response_length:
        why = f"an episode of {len(ids) - first} ids; data.max_response_length is {response_length}"
    if why:
        reply.reward, reply.credit = Reward(Score.missing(Reason.TOO_LONG, why)), None


def trajectories_of(reply: Rollout, filler: int) -> list[Trajectory]:
    """The rows of a reply: one, or one a turn where the credit says so; `filler`: an id for one that trains nothing."""
    talk, first = reply.conversation, _first(reply)
    mask = trained_mask(reply)
    ends = [(at, at + len(s.ids)) for at, s in talk.places()] if reply.credit and reply.credit.split else []
    ids, logprobs = talk.ids, talk.logprobs
    rows = [
        Trajectory(ids[:first], ids[first:stop], [0] * (start - first) + mask[start:stop], logprobs[first:stop])
        for start, stop in ends or [(first, len(ids))]
    ]
    return [row for row in rows if row.trains] or [Trajectory([filler], [filler], [0], [0.0])]


def trained_mask(reply: Rollout) -> list[int]:
    """1 beside each id of the episode that has something to learn from."""
    mask = [0] * len(reply.conversation.ids)
    for span in reply.credit.spans if reply.credit is not None else ():
        if span.parts and reply.credit is not None and not reply.credit.total(span.parts).is_missing:
            mask[span.start : span.stop] = [1] * (span.stop - span.start)
    return mask


def reward_numbers(reply: Rollout, metrics: Sequence[str]) -> dict[str, float]:
    """The means of all metrics, the missing ones too (NaN): verl wants the same keys of every row."""
    means = {name: mean.value for name, mean in reply.reward.means.items()}
    found = {name: means.get(name) for name in metrics}
    return {name: float("nan") if value is None else value for name, value in found.items()}


def _first(reply: Rollout) -> int:
    """How many ids the first prompt has; 0 when nothing was sampled."""
    return next((len(sample.context) for sample in reply.conversation.samples()), 0)
