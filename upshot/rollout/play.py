"""reply ──fork──▶ continue ──▶ score: all conversations of a step at once, on one event loop.

Nothing waits for a sibling: a future is scored as soon as it ends, while others still talk. What can fail fails alone:
an exception in a participant or a metric makes that future's score missing, with the reason.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from upshot.chat import Conversation, Row, Turn, derive_seed
from upshot.errors import UserError
from upshot.models.base import ModelCallError
from upshot.participants.base import Participant
from upshot.rewards.credit import credit_sampled
from upshot.rewards.metric import Metric, score_by
from upshot.rewards.reward import Reward, Weighted, combine
from upshot.rollout.episode import play_episode, play_future
from upshot.rollout.policy import Policy, cut_short
from upshot.rollout.reply import Future, Reply
from upshot.score import Reason, Score
from upshot.time_limit import CallTimeout


@dataclass(frozen=True)
class ReplyRule:
    """What happens to a reply that is not as it should be: 'score' it as any other, 'missing', or a 'penalty'."""

    rule: str = "score"
    penalty: float = -1.0
    """The reward of such a reply under the rule 'penalty'; its futures are not played."""

    def reward(self, what: Reason) -> Reward | None:
        """The reward that the rule gives at once; None when the reply is scored as any other."""
        if self.rule == "score":
            return None
        return Reward(Score(self.penalty) if self.rule == "penalty" else Score.missing(what))


@dataclass
class Scene:
    """Everything a step's conversations are played and scored with."""

    policy: Policy
    metrics: Mapping[str, Metric]
    weights: Mapping[str, Weighted]
    environment: Participant | None = None
    max_turns: int = 1
    user: Participant | None = None
    samples: int = 1
    window: int = 0
    overlong: ReplyRule = field(default_factory=ReplyRule)
    """For replies cut at the token limit."""
    malformed: ReplyRule = field(default_factory=ReplyRule)
    """For replies that say nothing and call no tool."""
    concurrency: int = 1024
    """Most episodes under way at once; their futures and metrics are bounded by the models' own limits."""


async def play_step(
    scene: Scene, rows: Sequence[Row], group_size: int, seed: int, done: Callable[[Reply], None] | None = None
) -> list[list[Reply]]:
    """Play `group_size` replies to every row; a list of groups in the order of the rows."""
    gate = asyncio.Semaphore(scene.concurrency)
    earlier = _earlier([row.id for row in rows])

    async def one(group: int, row: Row, index: int) -> Reply:
        # A row may come twice in a step; its later replies count on, so that every key (and session id) is its own.
        own = index + group_size * earlier[group]
        async with gate:
            conversation = Conversation(row, derive_seed(seed, row.id, group, index), key=f"{row.id}#{own}")
            reply = await play_reply(scene, conversation, group)
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


async def play_reply(scene: Scene, conversation: Conversation, group: int = 0) -> Reply:
    """Play one episode, fork it into futures, score them, credit the tokens."""
    reply = Reply(conversation, group)
    played = play_episode(conversation, scene.policy, scene.environment, scene.max_turns)
    failure = await _guard(played, "episode")
    if failure is not None:
        reply.reward = Reward(failure)
    else:
        await score_reply(scene, reply)
    reply.credit = credit_sampled(reply.reward.total, conversation.mask)
    return reply


async def score_reply(scene: Scene, reply: Reply) -> None:
    """Play and score the futures of a reply that has been given; sets its futures and reward."""
    decided = _by_rule(scene, reply.conversation.turns[-1])
    if decided is not None:
        reply.reward = decided
        return
    # Without a next turn all futures would be the same conversation: one is enough.
    samples = scene.samples if _goes_on(scene, reply.conversation) else 1
    async with asyncio.TaskGroup() as tasks:
        played = [tasks.create_task(_play_and_score(scene, reply.conversation, i)) for i in range(samples)]
    reply.futures = [task.result() for task in played]
    reply.reward = combine([future.scores for future in reply.futures], scene.weights)


def _by_rule(scene: Scene, turn: Turn) -> Reward | None:
    """The reward of a reply that a rule decides without futures."""
    if cut_short(turn):
        return scene.overlong.reward(Reason.OVERLONG)
    if not turn.message.content.strip() and not turn.message.tool_calls:
        return scene.malformed.reward(Reason.MALFORMED)
    return None


def _goes_on(scene: Scene, conversation: Conversation) -> bool:
    """Whether the futures have turns of their own; in an episode that ran out of room nobody could answer them."""
    return scene.user is not None and scene.window > 0 and conversation.ended != "length"


async def _play_and_score(scene: Scene, conversation: Conversation, index: int) -> Future:
    fork = conversation.fork("future", index)
    future = Future(fork)
    failure = None
    if scene.user is not None and _goes_on(scene, conversation):
        failure = await _guard(play_future(fork, scene.user, scene.policy, scene.window), "future")
    else:
        fork.ended = conversation.ended
    if failure is not None:
        future.missing = failure.reason
        future.scores = dict.fromkeys(scene.metrics, failure)
        return future
    future.scores = await score_conversation(scene.metrics, fork)
    return future


async def score_conversation(metrics: Mapping[str, Metric], conversation: Conversation) -> dict[str, Score]:
    """All metrics of one finished conversation, concurrently; one that raises is missing with its reason."""
    scores = await asyncio.gather(*(score_by(metric, conversation, name) for name, metric in metrics.items()))
    return dict(zip(metrics, scores, strict=True))


async def _guard(play: object, what: str) -> Score | None:
    """Await a piece of play; a missing score when it failed, None when it went through."""
    try:
        await play  # type: ignore[misc]
    except UserError:
        raise
    except Exception as error:
        return Score.failed(error, what)
    return None


def describe(error: Exception) -> str:
    """A short, countable reason for an exception."""
    if isinstance(error, ModelCallError | CallTimeout):
        return error.reason
    text = str(error).splitlines()[0][:120] if str(error) else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
