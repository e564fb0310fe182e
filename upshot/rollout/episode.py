"""The trained part of a conversation, and its futures: turn-taking, nothing else."""

from __future__ import annotations

from upshot.core.conversation import Conversation, Turn
from upshot.core.time_limit import limited
from upshot.rollout.policy import Policy
from upshot.tasks.participants.base import Observation, Participant, count


class NoRoom(Exception):
    """The opening alone fills the policy's context: there is no reply."""

    reason = "too_long"


async def play_episode(
    conversation: Conversation,
    policy: Policy,
    environment: Participant | None = None,
    max_turns: int = 1,
    turn_snapshots: list[Conversation] | None = None,
) -> None:
    """Let the policy take up to `max_turns` turns with the environment's observations between them.

    A list given as `turn_snapshots` is filled with the episode as it stands after each of the policy's turns.

    Without an environment one turn is played. The observation after the last turn is asked for (it may settle the
    environment's own score) but not appended: nobody would answer it.
    """
    if environment is None:
        await first_reply(conversation, policy)
        if turn_snapshots is not None:
            turn_snapshots.append(conversation.fork("turn", 0))
        return
    await limited(environment, environment.start, conversation)
    try:
        await _alternate(conversation, policy, environment, max_turns, [] if turn_snapshots is None else turn_snapshots)
    finally:
        await limited(environment, environment.end, conversation)


async def _alternate(
    conversation: Conversation,
    policy: Policy,
    environment: Participant,
    max_turns: int,
    turn_snapshots: list[Conversation],
) -> None:
    for turn in range(max_turns):
        if turn == 0:
            await first_reply(conversation, policy)
        elif await policy.reply(conversation) is None:
            return
        turn_snapshots.append(conversation.fork("turn", turn))
        observation = await limited(environment, environment.observe, conversation)
        count(conversation, observation.metrics)
        if observation.score is not None:
            conversation.session["turn_scores"] = {
                **conversation.session.get("turn_scores", {}),
                turn: observation.score,
            }
        if observation.done:
            conversation.ended = observation.reason
            return
        if turn < max_turns - 1:
            _append(conversation, observation)
    conversation.ended = "turns"


async def first_reply(conversation: Conversation, policy: Policy, role: str = "policy") -> Turn:
    """The policy's first turn; `NoRoom` where the opening leaves no room for it."""
    turn = await policy.reply(conversation, role)
    if turn is None:
        raise NoRoom("the prompt leaves no room for a reply in the model's context (model.max_context)")
    return turn


async def play_whole(conversation: Conversation, policy: Policy, user: Participant | None, max_messages: int) -> None:
    """Let policy and user talk until the user leaves or `max_messages` are said; the last word is the policy's."""
    await first_reply(conversation, policy)
    if user is not None:
        spoken = sum(message.role != "system" for message in conversation.messages)
        await play_future(conversation, user, policy, (max_messages - spoken) // 2, role="policy")
    if conversation.ended in (None, "window"):
        conversation.ended = "messages"


async def play_future(
    conversation: Conversation, user: Participant, policy: Policy, rounds: int, role: str = "future"
) -> None:
    """Continue a conversation for up to `rounds` rounds, each a turn of the user and one of the policy."""
    for _ in range(rounds):
        observation = await limited(user, user.observe, conversation)
        count(conversation, observation.metrics)
        _append(conversation, observation)
        if observation.done:
            conversation.ended = observation.reason
            return
        if await policy.reply(conversation, role) is None:
            return
    conversation.ended = "window"


def _append(conversation: Conversation, observation: Observation) -> None:
    for position, message in enumerate(observation.messages):
        last = position == len(observation.messages) - 1
        conversation.say(message, note=observation.note if last else None)
