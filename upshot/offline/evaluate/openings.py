"""Whole conversations on a task's held-out rows: did it end well, what did it cost, did the first reply ask?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from upshot.core.conversation import Conversation, Row, derive_seed
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.rewards.metric import Metric
from upshot.rollout.episode import first_reply, play_future
from upshot.rollout.play import score_conversation
from upshot.rollout.policy import Policy
from upshot.tasks.participants.base import Participant


@dataclass(frozen=True)
class OpeningOutcome:
    """How one held-out conversation went."""

    conversation: Conversation
    score: Score
    tokens: int
    asked: bool
    """Whether the first reply was a question."""


async def play_openings(
    rows: Sequence[Row],
    policy: Policy,
    user: Participant,
    metric: Metric,
    rounds: int,
    seed: int,
    asks: Callable[[str], bool],
) -> list[OpeningOutcome]:
    """Play every row to its end, at most `rounds` user turns, all at once; score the end."""

    async def one(row: Row) -> OpeningOutcome:
        conversation = Conversation(row, derive_seed(seed, "eval", row.id))
        try:
            first = await first_reply(conversation, policy, role="eval")
            await play_future(conversation, user, policy, rounds)
        except UserError:
            raise
        except Exception as error:
            return OpeningOutcome(conversation, Score.failed(error, "conversation"), 0, False)
        scores: Mapping[str, Score] = await score_conversation({"score": metric}, conversation)
        tokens = sum(len(sample.ids) for sample in conversation.samples())
        return OpeningOutcome(conversation, scores["score"], tokens, asks(first.message.content))

    return list(await asyncio.gather(*(one(row) for row in rows)))
