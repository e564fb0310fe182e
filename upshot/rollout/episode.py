"""The trained part of a conversation, and its futures: turn-taking, nothing else.

An episode begins with the policy, and what the environment says to its last turn is heard but not answered. A future
begins with the user and ends with the policy, or with the user's parting words.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable

from upshot.core.conversation import Conversation
from upshot.core.errors import UserError
from upshot.core.score import Score
from upshot.core.time_limit import limit_call
from upshot.rollout.speaker import Policy
from upshot.tasks.participants.base import Observation, Participant, count


class NoRoom(Exception):
    """The opening alone fills the policy's context: there is no reply."""

    reason = "too_long"

    def __init__(self) -> None:
        super().__init__("the prompt leaves no room for a reply in the model's context (model.max_context)")


async def play_episode(
    conversation: Conversation,
    policy: Policy,
    environment: Participant | None = None,
    max_turns: int = 1,
    turn_snapshots: list[Conversation] | None = None,
    hear_last: bool = True,
) -> None:
    """Let the policy take up to `max_turns` turns with the environment's observations between them.

    A list given as `turn_snapshots` is filled with the episode as it stands after each of the policy's turns.

    Without an environment one turn is played. The observation after the last turn is asked for (it may settle the
    environment's own score) but not appended: nobody would answer it. Without `hear_last` it is not asked for either.
    """
    if environment is None:
        if await policy.reply(conversation) is None:
            raise NoRoom
        if turn_snapshots is not None:
            turn_snapshots.append(conversation.fork("turn", 0))
        return
    await limit_call(environment, environment.start, conversation)
    try:
        for turn in range(max_turns):
            last = turn == max_turns - 1
            if await policy.reply(conversation) is None:
                if turn == 0:
                    raise NoRoom
                return
            if turn_snapshots is not None:
                turn_snapshots.append(conversation.fork("turn", turn))
            if last and not hear_last:
                break
            observation = await _observe(environment, conversation)
            if observation.score is not None:
                conversation.turn_scores = {**conversation.turn_scores, turn: observation.score}
            if observation.done:
                conversation.ended = observation.reason
                return
            if not last:
                _append(conversation, observation)
        conversation.ended = "turns"
    finally:
        await limit_call(environment, environment.end, conversation)


async def play_whole(conversation: Conversation, policy: Policy, user: Participant | None, max_messages: int) -> None:
    """Let policy and user talk until the user leaves or `max_messages` are said; the last word is the policy's."""
    if await policy.reply(conversation) is None:
        raise NoRoom
    if user is None:
        conversation.ended = "messages"
    else:
        await play_future(conversation, user, policy, max_messages, "messages", "policy", max_messages)


async def play_future(
    conversation: Conversation,
    user: Participant,
    policy: Policy,
    rounds: int,
    ended: str | None = "rounds",
    role: str = "future",
    max_messages: float = math.inf,
) -> None:
    """Continue a fork for up to `rounds` rounds, each a turn of the user and one of the policy, within `max_messages`;
    then it has `ended` (None: it goes on).

    It ends earlier when the user is done, whose parting words are said, or when the policy has no room to reply.
    """
    for _ in range(rounds):
        if sum(turn.message.role != "system" for turn in conversation.turns) + 2 > max_messages:
            break
        observation = await _observe(user, conversation)
        _append(conversation, observation)
        if observation.done:
            conversation.ended = observation.reason
            return
        if await policy.reply(conversation, role) is None:
            return
    conversation.ended = ended


async def _observe(participant: Participant, conversation: Conversation) -> Observation:
    """What a participant says to the conversation so far, its numbers counted."""
    observation = await limit_call(participant, participant.observe, conversation)
    count(conversation, observation.metrics)
    return observation


def _append(conversation: Conversation, observation: Observation) -> None:
    for position, message in enumerate(observation.messages):
        last = position == len(observation.messages) - 1
        conversation.say(message, note=observation.note if last else None)


async def catch_failure(play: Awaitable[object], what: str) -> Score | None:
    """Await a piece of play; a missing score when it failed, None when it went through."""
    try:
        await play
    except UserError:
        raise
    except Exception as error:
        return Score.failed(error, what)
    return None
