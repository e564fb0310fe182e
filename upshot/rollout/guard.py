"""What can fail fails alone: an exception becomes a reason, a metric that raises a missing score."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

from upshot.chat import Conversation
from upshot.errors import UserError
from upshot.models.base import ModelCallError
from upshot.rewards.metric import Metric
from upshot.score import Score
from upshot.time_limit import CallTimeout, limited


async def guard(play: Awaitable[object]) -> str | None:
    """Await a piece of play; the reason when it failed, None when it went through."""
    try:
        await play
    except UserError:
        raise
    except Exception as error:
        return describe(error)
    return None


async def score_conversation(metrics: Mapping[str, Metric], conversation: Conversation) -> dict[str, Score]:
    """All metrics of one finished conversation, concurrently; one that raises is missing with its reason."""

    async def one(name: str, metric: Metric) -> Score:
        try:
            return await limited(metric, metric.score, conversation)
        except UserError:
            raise
        except Exception as error:
            return Score.missing(f"{name}: {describe(error)}")

    scores = await asyncio.gather(*(one(name, metric) for name, metric in metrics.items()))
    return dict(zip(metrics, scores, strict=True))


def describe(error: Exception) -> str:
    """A short, countable reason for an exception."""
    if isinstance(error, ModelCallError | CallTimeout):
        return error.reason
    text = str(error).splitlines()[0][:120] if str(error) else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
