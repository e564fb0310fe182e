"""reply ──fork──▶ continue ──▶ score ──▶ credit: all conversations of a step at once, on one event loop.

Nothing waits for a sibling: a future is scored as soon as it ends, while others still talk. What can fail fails alone:
an exception in a participant or a metric makes that future's score missing, with the reason.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from upshot.chat import Conversation, Row, derive_seed
from upshot.rewards.reward import Reward
from upshot.rollout.episode import play_episode
from upshot.rollout.guard import guard
from upshot.rollout.reply import Reply
from upshot.rollout.stage import Stage
from upshot.stopwatch import at_work


async def play_step(
    stage: Stage, rows: Sequence[Row], group_size: int, seed: int, done: Callable[[Reply], None] | None = None
) -> list[list[Reply]]:
    """Play `group_size` replies to every row; a list of groups in the order of the rows."""
    gate = asyncio.Semaphore(stage.concurrency)
    earlier = _earlier([row.id for row in rows])

    async def one(group: int, row: Row, index: int) -> Reply:
        # A row may come twice in a step; its later replies count on, so that every key (and session id) is its own.
        own = index + group_size * earlier[group]
        async with gate:
            conversation = Conversation(row, derive_seed(seed, row.id, group, index), key=f"{row.id}#{own}")
            reply = await play_reply(stage, conversation, group)
        if done is not None:
            done(reply)
        return reply

    async with asyncio.TaskGroup() as tasks:
        groups = [
            [tasks.create_task(one(number, row, index)) for index in range(group_size)]
            for number, row in enumerate(rows)
        ]
    return [[task.result() for task in group] for group in groups]


def _earlier(ids: Sequence[str]) -> list[int]:
    """How often each id occurred before."""
    seen: Counter[str] = Counter()
    out = []
    for name in ids:
        out.append(seen[name])
        seen[name] += 1
    return out


async def play_reply(stage: Stage, conversation: Conversation, group: int = 0) -> Reply:
    """Play one episode, continue it into its futures, settle reward and credit."""
    reply = Reply(conversation, group)
    moments = reply.moments if stage.futures.every_turn else None
    episode = play_episode(conversation, stage.policy, stage.environment, stage.max_turns, moments)
    with at_work("sample"):
        failure = await guard(episode, "episode")
    if failure is not None:
        reply.reward = Reward(failure)
        reply.credit = stage.futures.decided(reply, reply.reward)
    else:
        await score_reply(stage, reply)
    return reply


async def score_reply(stage: Stage, reply: Reply) -> None:
    """Play the futures of a reply that has been given, and settle it: sets futures, reward and credit."""
    decided = stage.decide(reply.conversation.turns[-1])
    if decided is not None:
        reply.reward, reply.credit = decided, stage.futures.decided(reply, decided)
        return
    await stage.futures.play(reply, stage.policy)
    reply.reward, reply.credit = stage.futures.settle(reply)
