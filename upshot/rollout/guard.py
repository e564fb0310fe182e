"""What can fail fails alone: an exception becomes a missing score, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

from upshot.core.conversation import Conversation
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.core.time_limit import CallTimeout
from upshot.models.base import ModelCallError
from upshot.rewards.metric import Metric, score_by


async def guard(play: Awaitable[object], what: str) -> Score | None:
    """Await a piece of play; a missing score when it failed, None when it went through."""
    try:
        await play
    except UserError:
        raise
    except Exception as error:
        return Score.failed(error, what)
    return None


async def score_conversation(metrics: Mapping[str, Metric], conversation: Conversation) -> dict[str, Score]:
    """All metrics of one finished conversation, concurrently; one that raises is missing with its reason."""
    scores = await asyncio.gather(*(score_by(metric, conversation, name) for name, metric in metrics.items()))
    return dict(zip(metrics, scores, strict=True))


def describe(error: Exception) -> str:
    """A short text for an exception."""
    if isinstance(error, ModelCallError | CallTimeout):
        return error.reason
    text = str(error).splitlines()[0][:120] if str(error) else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
