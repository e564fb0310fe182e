"""Turn-taking: the model in training as a speaker, the trained part of a conversation, and its futures.

The policy renders what was said, samples a turn and keeps its exact ids. An episode begins with the policy, and what
the environment says to its last turn is heard but not answered. A future begins with the user and ends with the policy,
or with the user's parting words.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from upshot.config.sampling import Sampling
from upshot.core.conversation import Conversation, Message, Sample, Tools, Turn, derive_seed
from upshot.core.errors import UserError
from upshot.core.score import Score, show
from upshot.core.thought import MARKERS, find_thought, split_thought
from upshot.core.time_limit import limit_call
from upshot.models.base import Model, Request
from upshot.models.rendering import Renderer
from upshot.tasks.participants.base import Observation, Participant


@dataclass(eq=False)
class Policy:
    """Speaks as the assistant in any number of conversations at once."""

    model: Model
    renderer: Renderer | None = None
    """None: the model is asked with messages (an endpoint); its turns can be scored but not trained."""
    sampling: Sampling = field(default_factory=Sampling)
    max_context: int = 0
    """Most tokens of prompt and reply together; 0 for no limit."""
    system: str = ""
    """A system prompt shown to this model only (the proactive prompt, for one)."""
    tools: Tools = ()
    """Those of every conversation that has none in its session."""
    think: tuple[str, str] | None = MARKERS
    """Markers around its thoughts, which are kept with the turn and not said to anybody; None: it has none."""
    form: Mapping[str, Any] = field(default_factory=dict)
    """What its text must follow: `schema` or `lark` of a `Request`."""

    def __post_init__(self) -> None:
        if not (self.model.abilities.ids_in and self.model.abilities.ids_out):
            self.renderer = None

    def at(self, temperature: float) -> Policy:
        """The same speaker at another temperature."""
        return replace(self, sampling=replace(self.sampling, temperature=temperature))

    async def reply(self, conversation: Conversation, role: str = "policy") -> Turn | None:
        """Sample the next turn and append it; None, with `ended = 'length'`, when there is no room left."""
        seed = derive_seed(conversation.seed, "turn", len(conversation.turns))
        sampling = replace(self.sampling, seed=seed)
        tools = conversation.session.get("tools") or self.tools
        if self.renderer is None:
            return await self._reply_by_messages(conversation, sampling, tools, role)
        context = self.renderer.context(with_system_prompt(conversation, self.system), tools)
        prompt = conversation.ids + context
        if self.max_context:
            room = self.max_context - len(prompt)
            if room < 1:
                conversation.ended = "length"
                return None
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        (completion,) = await self.model.generate(Request(prompt, sampling, role=role, **self.form))
        if completion.ids is None or completion.logprobs is None:
            raise ValueError("the policy's backend returned no token ids or log-probabilities; it cannot be trained")
        sampled = completion.ids, completion.logprobs, completion.finish, completion.version
        sample = self._with_thought(Sample(tuple(context), *sampled))
        text = completion.text
        note: dict[str, Any] = {}
        if sample.thought is not None:
            text = self.renderer.decode(sample.ids[sample.answer :]).lstrip()
            note = {"thought": self.renderer.decode(sample.ids[slice(*sample.thought)]).strip()}
        return conversation.say(Message("assistant", text, tool_calls=completion.tool_calls), sample, note)

    def _with_thought(self, sample: Sample) -> Sample:
        """The sample with the place of its thought, where it has one."""
        if self.think is None or self.renderer is None:
            return sample
        decode = self.renderer.decode_ids
        text = decode(list(sample.ids), skip_special_tokens=False)
        before = decode(list(sample.context[-16:]), skip_special_tokens=False)
        opened = before.rstrip().endswith(self.think[0])
        if not opened and self.think[0] not in text and self.think[1] not in text:
            return sample
        ended = sample.finish == "stop" and sample.ids[-1:] and sample.ids[-1] in self.renderer.end_ids
        spoken = sample.ids[:-1] if ended else sample.ids  # the end-of-turn token does not belong to the thought
        thought = find_thought(self.renderer.pieces(spoken), self.think, opened)
        if thought is None:
            return sample
        return replace(sample, thought=(thought.start, thought.stop), answer=thought.answer)

    def context(self, conversation: Conversation) -> list[int]:
        """What the policy would be shown next, after the ids that it has seen and said."""
        if self.renderer is None:
            raise ValueError("a policy that is asked with messages counts no ids")
        tools = conversation.session.get("tools") or self.tools
        return self.renderer.context(with_system_prompt(conversation, self.system), tools)

    def prompt_tokens(self, conversation: Conversation) -> int:
        """How many ids the policy would be shown to speak next."""
        return len(conversation.ids) + len(self.context(conversation))

    async def _reply_by_messages(self, conversation: Conversation, sampling: Sampling, tools: Tools, role: str) -> Turn:
        messages = with_system_prompt(conversation, self.system).messages
        request = Request(messages, sampling, tools=tools, role=role)
        (completion,) = await self.model.generate(request)
        thought, text = ("", completion.text) if self.think is None else split_thought(completion.text, self.think)
        note: dict[str, Any] = {"thought": thought, "tokens": completion.completion_tokens}
        note = {"finish": completion.finish} | {name: value for name, value in note.items() if value}
        return conversation.say(Message("assistant", text, tool_calls=completion.tool_calls), note=note)


def with_system_prompt(conversation: Conversation, system: str) -> Conversation:
    """The conversation as a model with a system prompt of its own sees it: with that in front."""
    if not system:
        return conversation
    rest = conversation.turns
    if rest and rest[0].message.role == "system":
        system = f"{rest[0].message.content}\n\n{system}"
        rest = rest[1:]
    return Conversation(conversation.row, conversation.seed, conversation.key, (Turn(Message("system", system)), *rest))


def is_cut(turn: Turn) -> bool:
    """Whether a policy turn was cut at the token limit rather than ended by the model."""
    finish = turn.sample.finish if turn.sample is not None else turn.note.get("finish")
    return finish == "length"


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
    if environment is not None:
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
            if environment is None:
                return
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
        if environment is not None:
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
        spoken = [turn for turn in conversation.turns if turn.message.role != "system"]
        if len(spoken) + 2 > max_messages:
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
    if not isinstance(observation, Observation):
        raise TypeError(f"{type(participant).__name__}.observe should return an Observation, not {show(observation)}")
    if observation.metrics:
        conversation.count(observation.metrics)
    return observation


def _append(conversation: Conversation, observation: Observation) -> None:
    for position, message in enumerate(observation.messages):
        conversation.say(message, note=None if observation.messages[position + 1 :] else observation.note)


async def catch_failure(play: Awaitable[object], what: str) -> Score | None:
    """Await a piece of play; a missing score when it failed, None when it went through."""
    try:
        await play
    except UserError:
        raise
    except Exception as error:
        return Score.failed(error, what)
    return None
