"""reply ──fork──▶ continue ──▶ score ──▶ credit: all conversations of a step at once, on one event loop.

Nothing waits for a sibling: a future is scored as soon as it ends, while others still talk. Failures are isolated:
an exception in a participant or a metric makes that future's score missing, with the reason.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from upshot.core.conversation import Conversation, Row, Turn, derive_seed
from upshot.core.errors import UserError
from upshot.core.event_loop import at_work
from upshot.core.score import Reason, Score
from upshot.core.time_limit import limit_call
from upshot.rewards.credit import Reward
from upshot.rollout.agents.recording import PlayedPath
from upshot.rollout.agents.runner import AgentRunner
from upshot.rollout.credit.rules import branch_off
from upshot.rollout.episode import Policy, catch_failure, is_cut, play_episode
from upshot.rollout.futures.talk import Futures
from upshot.rollout.reply import Rollout
from upshot.tasks.participants.base import Participant


@dataclass(frozen=True)
class ReplyRule:
    """What happens to a reply that is not as it should be: 'score' it as any other, 'missing', or a 'penalty'."""

    rule: str = "score"
    penalty: float = -1.0
    """The reward of such a reply under the rule 'penalty'; its futures are not played."""


@dataclass
class RolloutContext:
    """Everything needed to sample, continue and score a step's replies."""

    policy: Policy
    futures: Futures
    environment: Participant | None = None
    user: Participant | None = None
    """The simulated user that writes the first message of rows that have only a goal."""
    agent: AgentRunner | None = None
    """Whose program plays the episodes, instead of policy and environment in turns."""
    max_turns: int = 1
    hear_last: bool = True
    """Whether the environment is asked after the last turn as well. False if the futures begin by asking the same
    participant: what it does (a tool call, a message) would be done twice."""
    overlong: ReplyRule = field(default_factory=ReplyRule)
    """For replies cut at the token limit."""
    malformed: ReplyRule = field(default_factory=ReplyRule)
    """For replies that say nothing and call no tool."""
    concurrency: int = 1024
    """The maximum number of concurrent episodes; their futures and metrics are bounded by the models' own limits."""

    def decide(self, turn: Turn) -> Reward | None:
        """The reward of a reply that a rule decides without futures; None when it is scored as any other."""
        if is_cut(turn):
            how, reason = self.overlong, Reason.OVERLONG
        elif not turn.message.content.strip() and not turn.message.tool_calls:
            how, reason = self.malformed, Reason.MALFORMED
        else:
            return None
        if how.rule == "score":
            return None
        return Reward(Score(how.penalty) if how.rule == "penalty" else Score.missing(reason))


async def play_step(
    context: RolloutContext,
    rows: Sequence[Row],
    group_size: int,
    seed: int,
    done: Callable[[Rollout], None] | None = None,
    only: Collection[int] | None = None,
) -> list[list[Rollout]]:
    """Play `group_size` replies to every row, or only to those with the indices `only`; groups in the order of rows."""
    gate = asyncio.Semaphore(context.concurrency)
    earlier = count_earlier([row.id for row in rows])

    async def one(group: int, row: Row, index: int, opening: asyncio.Task[Opening]) -> Rollout:
        # A row may occur twice in a step. Numbering continues, so that every reply's key and session id are unique.
        number = index + group_size * earlier[group]
        opened = await opening
        async with gate:
            conversation = opened.conversation(row, seed, group, index, number)
            reply = await play_reply(context, conversation, group, opened.failure)
        if done is not None:
            done(reply)
        return reply

    async with asyncio.TaskGroup() as tasks:
        groups = []
        for group, row in enumerate(rows):
            if only is None or group in only:
                opening = tasks.create_task(open_row(context, row, seed, group))
                groups.append([tasks.create_task(one(group, row, index, opening)) for index in range(group_size)])
    return [[task.result() for task in replies] for replies in groups]


def count_earlier(ids: Sequence[str]) -> list[int]:
    """How often each id occurred before."""
    return [ids[:index].count(name) for index, name in enumerate(ids)]


@dataclass(frozen=True)
class Opening:
    """How the conversations of a row begin; the same for all replies to it, so that they can be compared."""

    turns: tuple[Turn, ...]
    session: dict[str, Any] = field(default_factory=dict)
    failure: Score | None = None
    """Why there is no opening: the simulated user, who was to open, failed or said nothing."""
    counts: Mapping[str, float] = field(default_factory=dict)

    def conversation(self, row: Row, seed: int, group: int, index: int, number: int) -> Conversation:
        """The conversation of a group's reply `index`; `number` counts all replies to the row in a step."""
        conversation = Conversation(row, derive_seed(seed, row.id, group, index), f"{row.id}#{number}", self.turns)
        conversation.session, conversation.counts = copy.deepcopy(self.session), self.counts
        return conversation


async def open_row(context: RolloutContext, row: Row, seed: int, group: int) -> Opening:
    """What is said before the policy speaks: the row's own messages, or the user's where it has only a goal."""
    if row.goal is None or has_opening(row):
        return Opening(Conversation(row).turns)
    return await open_by(context.user, Conversation(row, derive_seed(seed, row.id, group, "opening")))


async def open_by(user: Participant | None, conversation: Conversation) -> Opening:
    """How the simulated user opens a conversation."""
    row = conversation.row
    if user is None:
        raise UserError(
            f"row '{row.id}' has a goal but no message, and no user to write the opening; set futures.user (--user)"
        )
    failure = await catch_failure(limit_call(user, user.start, conversation), "user")
    if failure is None and (conversation.ended is not None or len(conversation.turns) == len(row.messages)):
        failure = Score.missing(Reason.NOTHING_SAID, "the user opened with nothing, or left at once")
    return Opening(conversation.turns, conversation.session, failure, conversation.counts)


def has_opening(row: Row) -> bool:
    """Whether anybody has spoken in the row's opening, a system prompt aside."""
    return not {"user", "assistant"}.isdisjoint([message.role for message in row.messages])


async def play_reply(
    context: RolloutContext, conversation: Conversation, group: int = 0, failure: Score | None = None
) -> Rollout:
    """Play one episode, continue it into its futures, find reward and credit.

    failure: why the opening failed, if it did; then nothing is played, and the reward is missing.
    """
    reply = Rollout(conversation, group)
    turn_snapshots = reply.turn_snapshots if context.futures.every_turn else None
    other_contexts: list[PlayedPath] = []
    if failure is None:
        if context.agent is not None:
            episode = context.agent.play(conversation, context.policy, other_contexts)
        else:
            episode = play_episode(
                conversation, context.policy, context.environment, context.max_turns, turn_snapshots, context.hear_last
            )
        with at_work("sample"):
            failure = await catch_failure(episode, "episode")
    if failure is not None:
        reply.reward = Reward(failure)
        reply.credit = context.futures.credit_for(reply, reply.reward)
    else:
        await score_reply(context, reply)
    for path in other_contexts:
        credit = context.futures.credit_for(Rollout(path.conversation, group), reply.reward)
        reply.other_paths.append(branch_off(path.conversation, path.start, reply.reward, credit))
    return reply


async def score_reply(context: RolloutContext, reply: Rollout) -> None:
    """Play the futures of a sampled reply, and score it: sets its futures, reward and credit."""
    decided = context.decide(reply.conversation.turns[-1])
    if decided is not None:
        reply.reward, reply.credit = decided, context.futures.credit_for(reply, decided)
        return
    await context.futures.play(reply, context.policy)
    reply.reward, reply.credit = context.futures.score(reply)
