"""The multiturn-aware reward as a library call: `upshot.reward(...)`.

    replies = upshot.reward(
        [{"role": "user", "content": "I need to solve a quadratic."}],
        ["Which one?", "x = 3."],
        goal="Solve x^2 - 5x + 6 = 0.", reference="x = 2 or x = 3",
        policy="http://127.0.0.1:8000/v1#my-model", user="openai/gpt-4o-mini", judge="openai/gpt-4o-mini",
        metrics={"accuracy": 1, "interactivity": 1}, samples=3, rounds=2,
    )
    print(replies[0].reward.total.value, replies[0].reward.terms)

What the settings are: `upshot/api/scorer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack, overload

from upshot.api.scorer import ModelLike, open_rater
from upshot.config.registry import check_value
from upshot.core.conversation import Message, Row, messages_from
from upshot.core.errors import UserError, user_error_in
from upshot.core.event_loop import run_anywhere
from upshot.models.client.budget import Budget
from upshot.rewards.build import Metrics
from upshot.rollout.context import ReplyRule
from upshot.rollout.rollout import Rollout
from upshot.tasks.base import Task
from upshot.tasks.participants.base import Participant

Messages = Sequence[Message] | Sequence[Mapping[str, Any]]
Replies = list[str] | tuple[str, ...]


class RewardOptions(TypedDict, total=False):
    """What `reward` takes by name; `Settings` says what each is and its default."""

    goal: Any
    reference: Any
    meta: Mapping[str, Any] | None
    seed: int
    policy: ModelLike | None
    user: ModelLike | Participant | None
    judge: ModelLike | None
    metrics: Metrics
    samples: int
    rounds: int
    max_tokens: int
    temperature: float
    system: str
    overlong: str | ReplyRule
    max_reply_tokens: int
    user_options: Mapping[str, Any]
    tokenizer: Any
    task: str | Task | None
    sandbox: Any
    budget: Budget | None


@overload
def reward(messages: Messages, replies: str, **options: Unpack[RewardOptions]) -> Rollout: ...
@overload
def reward(messages: Messages, replies: Replies, **options: Unpack[RewardOptions]) -> list[Rollout]: ...
def reward(messages: Messages, replies: str | Replies, **options: Unpack[RewardOptions]) -> Rollout | list[Rollout]:
    """The multiturn-aware reward of one reply (a `Rollout`), or of several (a list of them).

    A reply's `.reward` has total, terms and means, its `.futures` the conversations it led to.
    messages: the conversation before the reply. goal: what the user wants. reference: the right answer or document.
    meta: further fields of the row (`tests` for pass_rate, `task_desc` and `persona` for the user). seed: of the
    futures. All else is as in `Settings`. Works in a notebook, too, where an event loop is already running.
    """
    with one_line():
        return run_anywhere(_reward(messages, replies, **options))


@overload
async def reward_async(messages: Messages, replies: str, **options: Unpack[RewardOptions]) -> Rollout: ...
@overload
async def reward_async(messages: Messages, replies: Replies, **options: Unpack[RewardOptions]) -> list[Rollout]: ...
async def reward_async(
    messages: Messages, replies: str | Replies, **options: Unpack[RewardOptions]
) -> Rollout | list[Rollout]:
    """The same where you are async yourself."""
    with one_line():
        return await _reward(messages, replies, **options)


async def _reward(
    messages: Messages,
    replies: str | Replies,
    *,
    goal: Any = None,
    reference: Any = None,
    meta: Mapping[str, Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Rollout | list[Rollout]:
    many = [replies] if isinstance(replies, str) else list(check_value("replies", replies, list[str]))
    row = Row(
        "row", as_messages(messages), goal, reference, "api", check_value("meta", meta, dict[str, Any] | None) or {}
    )
    async with open_rater(**settings) as scorer:
        rated = await scorer.rate(row, many, check_value("seed", seed, int))
    return rated[0] if isinstance(replies, str) else rated


@contextmanager
def one_line() -> Iterator[None]:
    """What the user must mend is raised as that alone, without the exceptions and groups it came out of."""
    try:
        yield
    except (Exception, BaseExceptionGroup) as error:
        known = user_error_in(error)
        if known is None:
            raise
        known.__cause__ = known.__context__ = None
        raise known.with_traceback(None) from None


def as_messages(messages: Messages) -> tuple[Message, ...]:
    """Messages from messages or their dictionaries."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise UserError(f"messages is {messages!r:.80}: give a list, such as [{{'role': 'user', 'content': '…'}}]")
    for place, message in enumerate(messages):
        whole = (
            isinstance(message, Mapping) and "role" in message and isinstance(message.get("content", ""), str | None)
        )
        if not isinstance(message, Message) and not whole:
            raise UserError(f"messages[{place}] is {message!r:.80}: a message is {{'role': …, 'content': 'text'}}")
    return tuple(m if isinstance(m, Message) else messages_from([m])[0] for m in messages)
